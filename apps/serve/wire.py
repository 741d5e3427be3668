"""Binary messages of the SDK: batches and results travel as packed numbers, not as JSON.

The schema is the part of the SDK's `tinker_public.proto` that this service reads and writes; a test compares it with
the installed SDK. Shapes: K tokens of all sequences of a request in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from rl_runtime import InputError

SCHEMA: Mapping[str, str] = {
    "SparseCsr": "bytes values 1, bytes crow_indices 2, bytes col_indices 3",
    "Tensor": "bytes dense 1, SparseCsr sparse_csr 2, int32 dtype 3, repeated int64 shape 4",
    "BatchedTensor": "bytes data 1, bytes offsets 2, int32 dtype 3, repeated int64 trailing_shape 4",
    "ArrayRecord": "string type_tag 1, map BatchedTensor fields 2, int64 num_datums 3",
    "ForwardBackwardOutput": (
        "string loss_fn_output_type 1, repeated ArrayRecord loss_fn_outputs 2, map double metrics 3"
    ),
    "LossConfigValue": "double number 1, string text 2",
    "EncodedTextChunk": "bytes tokens 1",
    "Bytes": "",
    "Chunk": "EncodedTextChunk encoded_text 1, Bytes image 2, Bytes dmel 3",
    "Datum": "repeated Chunk model_input 1, map Tensor loss_fn_inputs 2",
    "ForwardBackwardRequest": (
        "string model_id 1, int32 seq_id 2, repeated Datum data 3, string loss_fn 4, map double loss_fn_config 5, "
        "bool forward_only 6, map LossConfigValue loss_fn_config_v2 7"
    ),
    "TopkLogprobs": "bytes token_ids 1, bytes logprobs 2, uint32 k 3, uint32 length 4",
    "SampledSequence": "int32 stop_reason 1, bytes tokens 2, bytes logprobs 3",
    "SampleResponse": (
        "repeated SampledSequence sequences 1, bytes prompt_logprobs 2, TopkLogprobs topk_prompt_logprobs 3"
    ),
}
"""Message -> its fields: label, type, name and number. Enums are int32 on the wire."""

_FLOAT32, _INT64 = 1, 2
_DTYPES = {_FLOAT32: np.float32, _INT64: np.int64}
STOP, LENGTH = 0, 1
"""Values of `SampledSequence.stop_reason`."""


@cache
def message(name: str) -> Any:
    """The class of a message of `SCHEMA`."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"plinth.{name}"))


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    """A pool of its own: a process may have the SDK's messages as well."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="plinth_serve.proto", package="plinth", syntax="proto3")
    for name, fields in SCHEMA.items():
        own = file.message_type.add(name=name)
        for text in filter(None, fields.split(", ")):
            *label, kind, key, number = text.split()
            is_map, made = label == ["map"], own.field.add(name=key, number=int(number))
            made.label = field.LABEL_REPEATED if label else field.LABEL_OPTIONAL
            value = made
            if is_map:
                entry_name = "".join(part.title() for part in key.split("_")) + "Entry"
                entry = own.nested_type.add(name=entry_name, options={"map_entry": True})
                entry.field.add(name="key", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_STRING)
                value = entry.field.add(name="value", number=2, label=field.LABEL_OPTIONAL)
                made.type, made.type_name = field.TYPE_MESSAGE, f".plinth.{name}.{entry_name}"
            if kind in SCHEMA:
                value.type, value.type_name = field.TYPE_MESSAGE, f".plinth.{kind}"
            else:
                value.type = getattr(field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


@dataclass(frozen=True, kw_only=True, eq=False)
class Datum:
    """One sequence of a batch."""

    tokens: NDArray[np.int32]
    inputs: Mapping[str, NDArray[Any]]
    """Values of each token for the loss, by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBackward:
    """A request for a forward pass, or for a forward and backward pass."""

    model_id: str
    seq_id: int
    loss_fn: str
    loss_config: Mapping[str, float | str]
    forward_only: bool
    data: Any
    """The messages of the batch; `read_data` reads them."""


def read_request(body: bytes) -> ForwardBackward:
    """The head of a request. Raises InputError for a body that is no such message."""
    request = message("ForwardBackwardRequest")()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise InputError(f"no message of the SDK: {error}", field="body") from error
    config: dict[str, float | str] = dict(request.loss_fn_config)
    config |= {key: value.text or value.number for key, value in request.loss_fn_config_v2.items()}
    return ForwardBackward(
        model_id=request.model_id,
        seq_id=request.seq_id,
        loss_fn=request.loss_fn,
        loss_config=config,
        forward_only=request.forward_only,
        data=request.data,
    )


def read_data(messages: Sequence[Any]) -> list[Datum]:
    """The batch of a request. Raises InputError for inputs other than text, and for damaged tensors."""
    return [_datum(one, index) for index, one in enumerate(messages)]


def _datum(datum: Any, index: int) -> Datum:
    where = f"data[{index}]"
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise InputError("images and audio", field=f"{where}.model_input", allowed="chunks of text")
    parts = [_numbers(chunk.encoded_text.tokens, np.int32, f"{where}.model_input") for chunk in datum.model_input]
    inputs = {name: _array(tensor, f"{where}.{name}") for name, tensor in datum.loss_fn_inputs.items()}
    return Datum(tokens=np.concatenate([np.zeros(0, np.int32), *parts]), inputs=inputs)


def _array(tensor: Any, where: str) -> NDArray[Any]:
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        shape = list(tensor.shape)
        raise InputError("several targets per token", field=where, value=shape, allowed="one value per token")
    if tensor.dtype not in _DTYPES:
        raise InputError(field=f"{where}.dtype", value=tensor.dtype, allowed="float32, int64")
    return _numbers(tensor.dense, _DTYPES[tensor.dtype], where)


def _numbers(data: bytes, dtype: Any, where: str) -> NDArray[Any]:
    try:
        return np.frombuffer(data, dtype)
    except ValueError as error:
        raise InputError(f"a damaged tensor: {error}", field=where) from error


def write_result(log_probs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """The result of a pass: log-probs by sequence, and metrics."""
    lens = np.array([0, *(len(row) for row in log_probs)], np.int64)
    data = np.concatenate([np.zeros(0, np.float32), *log_probs]).astype(np.float32)
    result = message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = result.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(log_probs))
    record.fields["logprobs"].data = data.tobytes()
    record.fields["logprobs"].offsets = (4 * lens.cumsum()).tobytes()
    record.fields["logprobs"].dtype = _FLOAT32
    answer: bytes = result.SerializeToString()
    return answer


def write_samples(
    sequences: Sequence[tuple[NDArray[np.int32], NDArray[np.float32], int]],
    prompt_log_probs: NDArray[np.float32] | None,
    top: tuple[NDArray[np.int32], NDArray[np.float32]] | None,
) -> bytes:
    """Sampled tokens, their log-probs and why each ended; log-probs of the prompt, and its likeliest tokens, [T, k]."""
    response = message("SampleResponse")()
    for tokens, log_probs, reason in sequences:
        row = response.sequences.add(stop_reason=reason, tokens=tokens.astype(np.int32).tobytes())
        row.logprobs = log_probs.astype(np.float32).tobytes()
    if prompt_log_probs is not None:
        response.prompt_logprobs = prompt_log_probs.tobytes()
    if top is not None:
        ids, values = top
        k, length = ids.shape[1], ids.shape[0]
        response.topk_prompt_logprobs.MergeFrom(
            message("TopkLogprobs")(token_ids=ids.tobytes(), logprobs=values.tobytes(), k=k, length=length)
        )
    answer: bytes = response.SerializeToString()
    return answer
