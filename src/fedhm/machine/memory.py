"""Too little memory: recognised in the errors of Python, torch and its libraries, and said in one sentence."""

import errno
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedhm.errors import FedhmError

# What errors say for lack of memory, in lower case. None of these libraries has an error of its own for it.
_MEMORY = (
    "memoryerror",
    "can't allocate memory",  # torch's allocator
    "cannot allocate memory (os error",  # of Rust, such as safetensors
    "not enough memory",  # torch's allocator on Windows, and our own sentence
    "out of memory",  # CUDA and other devices
    "alloc_failed",  # cuBLAS and cuDNN
    "bad_alloc",  # C++
    "could not create a primitive",  # oneDNN
    "could not create a memory",
    "could not execute a primitive",
    "failed to map segment from shared object",  # an import
)
_THREADS = ("can't start new thread", "thread creation failed", "pthread_create")

TRAINING_ADVICE = (
    "set train.micro_batch or train.checkpointing, or lower train.batch, engine.workers or the size of the model "
    "(model.width)"
)
EVALUATION_ADVICE = "lower evaluation.batch, engine.workers or the size of the model (model.width)"
DISTILLATION_ADVICE = "lower method.batch or the size of the model (model.width)"
DEVICE_ADVICE = ", or set engine.data_on_device = false"  # behind the other advice, if tasks run on an accelerator
MODEL_ADVICE = "choose a smaller model, such as a lower model.width"
DATA_ADVICE = "lower data.train_samples"
ROUND_ADVICE = "lower engine.workers, train.batch or the size of the model (model.width)"


class NotEnoughMemoryError(FedhmError):
    """Raised in place of all errors that mean too little memory."""


@contextmanager
def memory_errors(purpose: str, advice: str) -> Iterator[None]:
    """Raise one sentence in place of an error that means too little memory. The innermost sentence counts.

    purpose  such as "to read the data"
    advice   which settings to change
    """
    try:
        yield
    except NotEnoughMemoryError:
        raise
    except Exception as error:
        if not lacks_memory(error):
            raise
        _reserve.clear()
        raise NotEnoughMemoryError(_sentence(error, purpose, advice)) from error


def lacks_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or the error that it was raised for, means too little memory.

    Much of this library rephrases the errors of a user's model or data. So the errors behind a FedhmError count, but
    for those of the system, whose reason it tells.
    """
    rephrased = isinstance(error, FedhmError)
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, NotEnoughMemoryError) or (
            not isinstance(error, FedhmError) and not (rephrased and isinstance(error, OSError)) and _is_sign(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def mentions_lack_of_memory(text: str) -> bool:
    """Tell whether the output of a process says that it ended for lack of memory."""
    lowered = text.lower()
    return any(words in lowered for words in (*_MEMORY, *_THREADS))


def _is_sign(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if isinstance(error, SystemError):  # of C code that could not even make its error
        return "without exception set" in str(error) or "without setting an exception" in str(error)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    try:
        return mentions_lack_of_memory(str(error))
    except MemoryError:  # there is not even enough for the text
        return True


def _sentence(error: BaseException, purpose: str, advice: str) -> str:
    missing = "there is not enough memory"
    if not isinstance(error, MemoryError) and any(words in str(error).lower() for words in _THREADS):
        missing, advice = f"{missing}, or no thread is left,", f"{advice}, or set OMP_NUM_THREADS lower"
    return f"{missing} {purpose}: {advice}{_limit_note()}"


def _limit_note() -> str:
    """Return the limit of this process, if it has one, since its owner may not know of it."""
    limit = _address_space()
    return "" if limit is None else f"; 'ulimit -v' limits this process to {limit / 1e9:.2f} GB"


def _address_space() -> int | None:
    """Return the bytes that this process may map; None if there is no limit."""
    try:
        import resource
    except ImportError:  # on Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


# For the command line, whose process is our own.

RESERVE = 4 << 20  # bytes: enough to say a sentence
LEAST_FOR_TORCH = 600_000_000  # bytes that its libraries and those of numpy map when they are imported
_reserve: list[bytearray] = []  # freed when memory is short


def check_room_for_torch() -> None:
    """Raise if this process is not allowed the memory that PyTorch takes, before C++ code aborts the import."""
    limit = _address_space()
    if limit is not None and limit < LEAST_FOR_TORCH:
        raise NotEnoughMemoryError(f"there is not enough memory to load PyTorch: raise the limit{_limit_note()}")


def prepare_for_little_memory() -> None:
    """Keep some memory for the sentence, and keep tracebacks of other threads and destructors from hiding it."""
    _reserve.append(bytearray(RESERVE))
    sys.unraisablehook = _silent(sys.unraisablehook)
    threading.excepthook = _silent(threading.excepthook)


def _silent(shown: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def hook(raised: Any) -> None:
        if not lacks_memory(raised.exc_value):
            shown(raised)

    return hook
