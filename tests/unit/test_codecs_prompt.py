"""The hand-written prompt part of a request is what the protobuf library writes."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg.engines.base import BuildError, EngineRequest, Sampling
from smg.engines.grpc.codecs import CODECS, codec_for
from smg.engines.grpc.codecs.prompt import packed_ids, varint

IDS = st.lists(st.one_of(st.integers(0, 200), st.integers(16_000, 17_000), st.integers(0, 2**19 - 1)), min_size=1)


@pytest.mark.parametrize("kind", CODECS)
@given(ids=IDS, text=st.text(max_size=40), request_id=st.text(min_size=1, max_size=300))
def test_long_prompts(kind: str, ids: list[int], text: str, request_id: str) -> None:
    ids = ids * (400 // len(ids) + 1)
    codec = codec_for(kind)
    bound = codec.bind(EngineRequest("", "chat", "", (), True, Sampling(max_tokens=7)))
    try:
        written = bound(request_id, text, array("I", ids))
        expected = bound(request_id, text, ids)
    except BuildError:  # lone surrogates
        return
    assert written == expected
    message = codec.request_class.FromString(written)
    assert message.SerializeToString() == codec.encode(
        EngineRequest(request_id, "chat", text, ids, True, Sampling(max_tokens=7))
    )


def test_ids_beyond_the_table() -> None:
    ids = array("I", [1] * 500 + [2**32 - 1])
    assert packed_ids(ids) is None
    codec = codec_for("vllm")
    message = codec.request_class.FromString(codec.encode(EngineRequest("a", "chat", "", ids, True, Sampling())))
    assert message.tokenized.input_ids[-1] == 2**32 - 1


def test_varint() -> None:
    written = [varint(value) for value in (0, 127, 128, 300, 2**14)]
    assert written == [b"\0", b"\x7f", b"\x80\1", b"\xac\2", b"\x80\x80\1"]
