"""Single flipped bits in every file of a checkpoint: what is restored is what was saved, or it is
said."""

import functools
import random
from collections.abc import Iterator
from typing import Any

from benchmarks.hostile import _runs
from benchmarks.hostile.case import Case, Fault, Group, Observed, Verdict

_KEPT = (
    "the checkpoint before it, which is taken; the damaged one under its name, or as "
    "<step>.unreadable"
)
_FAULTS = {
    "state/ocdbt.process_0/d/*": Fault("a flipped bit in the data of arrays", _KEPT),
    "state/d/*": Fault("a flipped bit in the index of arrays", _KEPT),
    "state/manifest.ocdbt": Fault("a flipped bit in the list of array files", _KEPT),
    "state/_METADATA": Fault("a flipped bit in the names of arrays", _KEPT),
    "_CHECKPOINT_METADATA": Fault(
        "a flipped bit in the digests and the score of a checkpoint", _KEPT
    ),
}
_UNREAD = Fault("a flipped bit in a file of a checkpoint that is not read", "everything")
_WAYS = ("last", "4", "last", "best", "last", "4", "train")


def _attack(pattern: str, place: float, how: str) -> Observed:
    with _runs.copy() as workdir:
        path = _runs.find(workdir / "checkpoints" / "4", pattern)
        content = bytearray(path.read_bytes())
        position = int(place * 8 * len(content))
        content[position // 8] ^= 1 << position % 8
        path.write_bytes(content)
        before = _runs.contents(workdir)
        if how == "train":
            observed = _runs.judge(functools.partial(_runs.train, workdir), _runs.is_final_state)
        else:
            which: Any = int(how) if how.isdecimal() else how
            observed = _runs.judge(
                functools.partial(_runs.restore, workdir, which),
                functools.partial(_runs.is_saved_state, which=which),
            )
        what = _runs.lost(before, workdir, observed, trained=how == "train")
        return Observed(Verdict.LOST, what) if what else observed


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yields flips in all files in turn, each in a place of its own, restored in one of the ways in
    turn."""
    draw = random.Random(seed)
    for number in range(count):
        again, index = divmod(number, len(_runs.CHECKPOINT_FILES))
        pattern, how, place = (
            _runs.CHECKPOINT_FILES[index],
            _WAYS[again % len(_WAYS)],
            draw.random(),
        )
        name = f"{pattern} at {place:.6f} of its length, then {how}"
        yield Case(
            _FAULTS.get(pattern, _UNREAD), name, functools.partial(_attack, pattern, place, how)
        )


GROUP = Group("flips", 260, cases)
