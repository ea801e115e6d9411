"""Text as training data: bytes are the tokens, so no tokenizer and no download.

By default the text is the source code of the running Python's standard library, which
is real text and present on every machine.

A sample depends on the seed and on its global index alone. Step s with batch size B
holds the samples s * B .. (s + 1) * B - 1 however many processes share the work, so
every layout trains on the same global batches.
"""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256

# Enough text that 10,000 samples of 128 bytes hardly overlap, read in well under a second.
MAXIMUM_BYTES = 4 * 1024 * 1024

# Not the library itself: installed packages, and tests, which are long and monotonous.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


class CorpusError(ValueError):
    """The text cannot serve as training data; the message says what would."""


@dataclass(frozen=True)
class Corpus:
    """A run of bytes from which batches are cut.

    Arguments:
        tokens: uint8 (n,); batches come out on its device.
        origin: where the text is from, for messages.
        seed: another seed cuts other samples.
    """

    tokens: Tensor
    origin: str
    seed: int = 0

    def batch(self, step: int, batch_size: int, sequence_length: int) -> tuple[Tensor, Tensor]:
        """The global batch of `step`: inputs, and the byte that follows each of them.

        Returns:
            two int64 tensors (batch_size, sequence_length).

        Raises:
            CorpusError: the text is shorter than one sample.

        Example:
            >>> corpus = Corpus(torch.arange(100, dtype=torch.uint8), "the numbers below 100")
            >>> inputs, targets = corpus.batch(0, batch_size=2, sequence_length=4)
            >>> bool((targets == inputs + 1).all())
            True
        """
        starts = [self.sample_start(step * batch_size + row, sequence_length) for row in range(batch_size)]
        samples = torch.stack([self.tokens[at : at + sequence_length + 1] for at in starts]).long()
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def sample_start(self, index: int, sequence_length: int) -> int:
        """Where in the text the sample of global `index` begins."""
        needed = sequence_length + 1
        if len(self.tokens) < needed:
            raise CorpusError(
                f"{self.origin} holds {len(self.tokens)} bytes, and one sample needs {needed}: "
                f"{sequence_length} inputs and the byte after them; "
                f"give a text of at least {needed} bytes (better: 100 times as many)"
            )
        return random.Random(f"{self.seed}/{index}").randrange(len(self.tokens) - needed + 1)


def read_corpus(file: Path | None, *, seed: int, device: torch.device) -> Corpus:
    """The corpus of `file`, or that of Python's standard library when it is None."""
    if file is None:
        text, origin = standard_library_text(), "the source of Python's standard library"
    else:
        try:
            text, origin = file.read_bytes(), str(file)
        except OSError as error:
            raise CorpusError(
                f"cannot read {file}: {error.strerror}; --data takes any readable file, "
                f"and without it the source of Python's standard library is used"
            ) from error
    # bytearray: torch shares the buffer, and wants one it may write to. It takes no empty one.
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)
    return Corpus(tokens.to(device, torch.uint8), origin, seed)


def standard_library_text(maximum_bytes: int = MAXIMUM_BYTES) -> bytes:
    """The first `maximum_bytes` of the standard library's modules, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
            if len(text) >= maximum_bytes:
                break
    if not text:
        raise CorpusError(
            f"no Python sources under {root} (this Python keeps its library elsewhere, "
            f"perhaps in an archive): give a text with --data FILE"
        )
    return bytes(text[:maximum_bytes])
