"""Enumerations of the public API: each as plain data has it, and as its messages do. Nothing else lives here."""

from typing import Final

from holdfast.v1 import inference_pb2
from holdfast.worker.request import FinishReason, Priority

PRIORITIES: Final = {
    Priority.CRITICAL: inference_pb2.PRIORITY_CRITICAL,
    Priority.HIGH: inference_pb2.PRIORITY_HIGH,
    Priority.NORMAL: inference_pb2.PRIORITY_NORMAL,
    Priority.LOW: inference_pb2.PRIORITY_LOW,
}
PRIORITIES_READ: Final = {int(number): priority for priority, number in PRIORITIES.items()} | {
    int(inference_pb2.PRIORITY_UNSPECIFIED): Priority.NORMAL
}
FINISH_REASONS: Final = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}
FINISH_REASONS_READ: Final = {int(number): reason for reason, number in FINISH_REASONS.items()}
