"""Messages of ``proto/common.proto``. Written by ``scripts/gen_proto.py``; do not edit."""

from typing import Any

from smg.engines.grpc.pb import pool

pool.add(
    b'\n\x0ccommon.proto\x12\x0fsmg.grpc'
    b'.common"\x15\n\x13GetTokenizerR'
    b'equest"?\n\x11GetTokenizerCh'
    b'unk\x12\x12\n\x04data\x18\x01 \x01(\x0cR\x04data\x12'
    b'\x16\n\x06sha256\x18\x02 \x01(\tR\x06sha256"'
    b'0\n\x11FlushCacheRequest\x12\x1b\n\t'
    b'timeout_s\x18\x01 \x01(\x02R\x08timeout'
    b'S"H\n\x12FlushCacheResponse\x12'
    b'\x18\n\x07success\x18\x01 \x01(\x08R\x07succes'
    b's\x12\x18\n\x07message\x18\x02 \x01(\tR\x07mess'
    b'age"\xe4\x02\n\x13StartProfileRequ'
    b'est\x12"\n\noutput_dir\x18\x01 \x01(\tH'
    b'\x00R\toutputDir\x88\x01\x01\x12"\n\nstart'
    b'_step\x18\x02 \x01(\x05H\x01R\tstartStep'
    b'\x88\x01\x01\x12 \n\tnum_steps\x18\x03 \x01(\x05H\x02'
    b'R\x08numSteps\x88\x01\x01\x12\x1e\n\nactivit'
    b'ies\x18\x04 \x03(\tR\nactivities\x12"\n'
    b'\nwith_stack\x18\x05 \x01(\x08H\x03R\twit'
    b'hStack\x88\x01\x01\x12(\n\rrecord_shap'
    b'es\x18\x06 \x01(\x08H\x04R\x0crecordShapes'
    b'\x88\x01\x01\x12(\n\x10profile_by_stage\x18'
    b'\x07 \x01(\x08R\x0eprofileByStageB\r\n'
    b'\x0b_output_dirB\r\n\x0b_start_s'
    b'tepB\x0c\n\n_num_stepsB\r\n\x0b_wi'
    b'th_stackB\x10\n\x0e_record_shap'
    b'es"\x14\n\x12StopProfileRequest'
    b'"E\n\x0fProfileResponse\x12\x18\n\x07s'
    b'uccess\x18\x01 \x01(\x08R\x07success\x12\x18\n'
    b'\x07message\x18\x02 \x01(\tR\x07messageb'
    b'\x06proto3'
)

GetTokenizerRequest: Any = pool.message_class("smg.grpc.common.GetTokenizerRequest")
GetTokenizerChunk: Any = pool.message_class("smg.grpc.common.GetTokenizerChunk")
FlushCacheRequest: Any = pool.message_class("smg.grpc.common.FlushCacheRequest")
FlushCacheResponse: Any = pool.message_class("smg.grpc.common.FlushCacheResponse")
StartProfileRequest: Any = pool.message_class("smg.grpc.common.StartProfileRequest")
StopProfileRequest: Any = pool.message_class("smg.grpc.common.StopProfileRequest")
ProfileResponse: Any = pool.message_class("smg.grpc.common.ProfileResponse")
