"""A lean HTTP/2 client for the token streams of gRPC workers.

``machine`` is the protocol without I/O, ``transport`` puts it on asyncio; ``headers`` and ``frames`` hold the formats.
"""

from smg.engines.grpc.h2.transport import LeanTransport

__all__ = ["LeanTransport"]
