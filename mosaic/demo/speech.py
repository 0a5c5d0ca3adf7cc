"""Speech without a microphone: espeak-ng through ctypes, from the wheel that carries its library and voices."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mosaic.errors import MosaicError

INSTALL_HINT = "pip install 'mosaic-colocate[demo]'"

# From espeak-ng's speak_lib.h, whose binary interface has been fixed for many years.
_OUTPUT_SYNCHRONOUS = 2
_INITIALIZE_DONT_EXIT = 0x8000
_CHARS_UTF8 = 1
_POSITION_CHARACTER = 1
_RATE = 1
# The library keeps its data path in a buffer of 160 characters; deeper folders are reached through a link.
_LONGEST_DATA_PATH = 120

_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def _find_library() -> tuple[Path, Path]:
    """Returns the shared library and the folder of its voice data."""
    try:
        import espeakng_loader
    except ImportError as error:
        raise MosaicError(
            f"espeakng_loader cannot be imported ({error}); the demo's speech needs it: {INSTALL_HINT}"
        ) from error
    try:
        return Path(espeakng_loader.get_library_path()), Path(espeakng_loader.get_data_path())
    except RuntimeError as error:
        raise MosaicError(f"espeakng_loader has lost its voices ({error}); install it again: {INSTALL_HINT}") from error


def _load_copy(path: Path, folder: Path) -> ctypes.CDLL:
    """Loads the library by another name, so it shares no state with earlier copies."""
    try:
        library = ctypes.CDLL(str(shutil.copy(path, folder)))
    except OSError as error:
        raise MosaicError(
            f"espeak-ng's library does not load here ({error}); install a wheel made for this system "
            f"({INSTALL_HINT}), and let TMPDIR name a folder from which libraries may be loaded"
        ) from error
    library.espeak_Initialize.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
    library.espeak_SetVoiceByName.argtypes = [ctypes.c_char_p]
    library.espeak_SetParameter.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int]
    library.espeak_ng_SetRandSeed.argtypes = [ctypes.c_long]
    library.espeak_Synth.argtypes = [
        *(ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint, ctypes.c_uint),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ]
    return library


class Synthesiser:
    """Speaks words with espeak-ng; the same words in the same order sound the same every time. Use from one thread.

    The library's state (pitch flutter, breath) outlives its own termination, so each synthesiser loads a fresh copy.

    Attributes:
        sample_rate: Samples a second.

    Raises:
        MosaicError: If espeak-ng is missing or broken.
    """

    def __init__(self) -> None:
        library_path, data_path = _find_library()
        with ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="espeak-")))
            if len(str(data_path)) > _LONGEST_DATA_PATH:
                link = folder / "espeak-ng-data"
                link.symlink_to(data_path)
                data_path = link
            self._library = _load_copy(library_path, folder)
            rate = self._library.espeak_Initialize(_OUTPUT_SYNCHRONOUS, 0, bytes(data_path), _INITIALIZE_DONT_EXIT)
            if rate <= 0:
                raise MosaicError(f"espeak-ng cannot use the voices in {data_path}; install again: {INSTALL_HINT}")
            undo.callback(self._library.espeak_Terminate)
            self._close = undo.pop_all().close
        self.sample_rate = int(rate)
        self._chunks: list[bytes] = []
        # Kept as an attribute: the library calls it for as long as it is initialised.
        self._callback = _Callback(self._take_samples)
        self._library.espeak_SetSynthCallback(self._callback)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def speak(self, word: str, *, voice: str, words_per_minute: int) -> NDArray[np.int16]:
        """Speaks one word.

        Args:
            word: The word, in the voice's language.
            voice: espeak-ng's name, a language and perhaps a variant: ``en-us+f2``.
            words_per_minute: Speed, 80 to 450.

        Returns:
            Samples, shape ``(num_samples,)``, with the silence that espeak-ng leaves around a word.

        Raises:
            ValueError: If the voice is unknown, or the speed is out of range.
            MosaicError: If espeak-ng fails or is silent.
        """
        if not 80 <= words_per_minute <= 450:
            raise ValueError(f"words_per_minute={words_per_minute} is outside what espeak-ng can do; use 80 to 450")
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"voice={voice!r} is unknown to espeak-ng; use a language such as 'en-us' or 'en-us+f2'")
        self._library.espeak_SetParameter(_RATE, words_per_minute, 0)
        # Breath and flutter come from a random generator: without a seed no two runs would speak alike.
        self._library.espeak_ng_SetRandSeed(1)
        self._chunks.clear()
        text = word.encode()
        status = self._library.espeak_Synth(text, len(text) + 1, 0, _POSITION_CHARACTER, 0, _CHARS_UTF8, None, None)
        samples = np.frombuffer(b"".join(self._chunks), dtype=np.int16)
        if status != 0 or not samples.any():
            raise MosaicError(f"espeak-ng said nothing for {word!r} with voice {voice!r} (status {status})")
        return samples

    def _take_samples(self, samples: ctypes._Pointer[ctypes.c_short], count: int, events: int | None) -> int:
        if samples and count > 0:
            self._chunks.append(ctypes.string_at(samples, 2 * count))
        return 0
