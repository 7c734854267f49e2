"""Tries the decoders with bad streams, in a process of its own; run as a script.

`python fuzz_decoders.py SEED COUNT CASE`: CASE is a file that holds the stream under trial, so that it is known if the
process dies of it. Prints, as JSON, how many streams were read and how many refused.
"""

from __future__ import annotations

import json
import mmap
import random
import resource
import struct
import sys
from collections import Counter
from pathlib import Path

from pydantic import ValidationError
from streams import good_streams, messages, mutated, odd_streams

from coordinator.wire.columns import ArrowError, Ragged, decode_candidates, decode_reserve, decode_rollouts

DECODERS = {"rollouts": decode_rollouts, "reserve": decode_reserve, "candidates": decode_candidates}
ROOM = 192 * 2**20
"""What a decoder may take for streams of at most some 30 kB: bytes, on top of what the process has."""


class Trials:
    """Decodes one stream after the other and counts what became of them."""

    def __init__(self, case: Path) -> None:
        case.write_bytes(bytes(2**20))
        with case.open("r+b") as file:
            self._case = mmap.mmap(file.fileno(), 0)
        self.outcomes: Counter[str] = Counter()

    def refused(self, decoder: str, stream: bytes) -> bool:
        """Whether this decoder refused this stream, in the way that it may."""
        self._case[:8] = struct.pack("<Q", len(stream))
        self._case[8 : 8 + len(stream)] = stream
        try:
            decoded = DECODERS[decoder](stream)
        except ArrowError:
            self.outcomes["refused"] += 1
            return True
        except ValidationError:
            assert decoder == "reserve", "only a reservation's fields are refused as those of a model"
            self.outcomes["invalid"] += 1
            return True
        for column in vars(decoded).values():
            if isinstance(column, Ragged):
                assert len(column) == len(decoded)
                assert column.offsets[0] == 0
                assert (column.offsets[1:] >= column.offsets[:-1]).all()
                assert column.offsets[-1] == len(column.values)
        self.outcomes["read"] += 1
        return False


def main(seed: int, count: int, case: Path) -> None:
    """Good streams, odd streams, streams cut short, then `count` accidents."""
    trials = Trials(case)
    good = good_streams()
    streams = [*good.values()]
    readable = [*good.items()]
    for name, stream in good.items():
        assert not trials.refused(name, stream), name
        odd = dict(odd_streams(stream))
        streams += odd.values()
        for what, other in odd.items():
            if not trials.refused(name, other):
                readable.append((name, other))
            if what in ("lz4", "zstd"):
                assert trials.refused(name, other), what
        assert not trials.refused(name, odd["in batches"])
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    for name, stream in good.items():
        for length in range(len(stream)):
            assert trials.refused(name, stream[:length]), f"{name} cut to {length} bytes"
    for stream in streams:
        for end in messages(stream):
            for name in DECODERS:
                assert trials.refused(name, stream[:end]), "cut between two messages"
        for name in DECODERS:
            assert trials.refused(name, stream + b"\x00"), "followed by a byte"
            assert trials.refused(name, stream + stream), "sent twice"
    chance = random.Random(seed)
    for _ in range(count):
        # Mostly such as are read as they are: the others rarely get far.
        name, source = chance.choice(readable)
        if chance.random() < 0.2:
            source = chance.choice(streams)
        trials.refused(name, mutated(source, chance.choice(streams), chance))
    print(json.dumps(trials.outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
