"""Does a chat template take message content as a string or as a list of parts?

Decided from the template's syntax tree, by the rule that serving engines share: a template that loops over the content
of a message takes parts ("openai"), any other a string. "Content of a message" is ``m.content`` or ``m['content']``,
perhaps behind filters, tests or slices, of a loop variable ``m`` over ``messages`` or over a variable assigned from it;
inside a macro, a parameter that some call fills with such an access; outside every macro, also a variable named
``content``.
"""

from __future__ import annotations

from collections.abc import Iterator

import jinja2
from jinja2 import nodes

STRING, OPENAI = "string", "openai"


def content_format(template: nodes.Template | None) -> str:
    """``"openai"`` or ``"string"`` for a parsed template; None stands for one that does not parse."""
    if template is None:
        return STRING
    messages = _message_variables(template)
    macros = list(template.find_all(nodes.Macro))
    in_macros = {id(loop) for macro in macros for loop in macro.find_all(nodes.For)}
    for loop in template.find_all(nodes.For):
        if _is_content(loop.iter, messages):
            return OPENAI
        if id(loop) not in in_macros and _name(_unwrap(loop.iter)) == "content":
            return OPENAI
    for macro in macros:
        filled = _content_parameters(template, macro, messages)
        if any(_name(_unwrap(loop.iter)) in filled for loop in macro.find_all(nodes.For)):
            return OPENAI
    return STRING


def parse_template(source: str, environment: jinja2.Environment) -> nodes.Template | None:
    """The syntax tree of a template, None when it has syntax errors."""
    try:
        return environment.parse(source)
    except jinja2.TemplateSyntaxError:
        return None


def _unwrap(node: nodes.Node) -> nodes.Node:
    """The expression under filters, tests and slices."""
    while True:
        match node:
            case nodes.Filter(node=nodes.Expr() as inner) | nodes.Test(node=inner):
                node = inner
            case nodes.Getitem(node=inner, arg=nodes.Slice()):
                node = inner
            case _:
                return node


def _name(node: nodes.Node) -> str:
    return node.name if isinstance(node, nodes.Name) else ""


def _is_content(node: nodes.Node, messages: set[str]) -> bool:
    """Whether an expression is the content of a message variable."""
    node = _unwrap(node)
    if isinstance(node, nodes.Getattr):
        key: object = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        key = node.arg.value
    else:
        return False
    return key == "content" and _name(_unwrap(node.node)) in messages


def _message_variables(template: nodes.Template) -> set[str]:
    """Targets of loops over the message list or over a variable assigned from it."""
    lists = {"messages"}
    assignments = list(_assignments(template))
    grown = True
    while grown:
        new = {name for name, value in assignments if _name(_unwrap(value)) in lists} - lists
        lists |= new
        grown = bool(new)
    targets = (loop.target for loop in template.find_all(nodes.For) if _name(_unwrap(loop.iter)) in lists)
    return {target.name for target in targets if isinstance(target, nodes.Name)}


def _assignments(template: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            yield assignment.target.name, assignment.node


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    """Parameters of a macro that some call fills with the content of a message."""
    parameters = [argument.name for argument in macro.args]
    filled = set()
    for call in template.find_all(nodes.Call):
        if _name(call.node) != macro.name:
            continue
        given = [*zip(parameters, call.args, strict=False), *((keyword.key, keyword.value) for keyword in call.kwargs)]
        filled |= {name for name, value in given if _is_content(value, messages)}
    return filled
