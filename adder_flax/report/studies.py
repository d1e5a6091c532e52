"""Studies of runs: what ``--mode=analyze`` reports on, found by the name of the task."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from adder_flax.parameters import has_prototypes
from adder_flax.registry import Registry
from adder_flax.report import _study
from adder_flax.report.expansion import second_order_along
from adder_flax.report.families.alignments import SequenceStudy, observe_sequences
from adder_flax.text import printable

if TYPE_CHECKING:
    from adder_flax.training import Run

_IMAGES = 32
# The model is run on them a hundred times.
_PROBED_IMAGES, _OF_PHOTOGRAPHS, _PHOTOGRAPH = 256, 64, 64
_WORDS = 512
_STUDIED_STEPS = 3


class Trained(NamedTuple):
    """A run at a checkpoint, with its name in captions and the state that was restored; `few` is
    what ``--mode=quantize`` made of it, where that is looked at in its place.
    """

    name: str
    run: "Run"
    state: Any
    few: nnx.Module | None = None

    @property
    def model(self) -> nnx.Module:
        """The model that is evaluated."""
        if self.few is not None:
            return self.few
        from adder_flax.training import evaluation_params  # figures are drawn without what trains

        return self.run.model(evaluation_params(self.state))


MakeStudy = Callable[[Trained, Trained | None], Any]

STUDIES: Registry[MakeStudy] = Registry(
    "task whose runs can be analyzed", "adder_flax.report.register_study"
)
"""By name of the task: what its runs are looked at for."""


def register_study(task: str) -> Callable[[MakeStudy], MakeStudy]:
    """Lets ``--mode=analyze`` report on the runs of a task.

    Decorates ``make(trained, baseline) → study``, where ``baseline`` is another run on the same
    data, or None, and the study is as `write_study` has it. The report has the families of claims
    that are made for such a study, see `register_claims`.
    """
    return lambda make: STUDIES.register(task, make, origin=(make.__module__, make.__qualname__))


@register_study("classification")
@register_study("distillation")
@register_study("healing")
def study_classification(trained: Trained, baseline: Trained | None) -> _study.ImageStudy:
    """Looks at a classifier on the first images of the evaluation split, and at training steps."""
    from adder_flax.data import ImageSource, require_kind  # figures are drawn without data

    run, model = trained.run, trained.model
    source = require_kind(ImageSource, run.eval_source, "this report")
    batch, start = source.first(_IMAGES), run.init()
    (images,) = map(np.asarray, run.task.inputs(batch))
    look = lambda name, model: _study.observe(name, model, images)
    options: Any = dict(num_steps=_STUDIED_STEPS, derivatives=not has_prototypes(model))
    steps = lambda state: list(second_order_along(run, state, **options))
    starts = {"from the start": start, "from the checkpoint": trained.state}
    return _study.study_images(
        look(trained.name, model),
        batch["label"],
        _probe(run, model, source),
        baseline=None if baseline is None else look(baseline.name, baseline.model),
        untrained=look("untrained", run.model(start["params"])),
        pictures=batch["image"],
        label_names=source.label_names,
        # What is in few bits does not train.
        second_order={} if trained.few else {at: steps(state) for at, state in starts.items()},
        peak_learning_rate=run.config.optimizer.learning_rate,
        answers=_answers(run, model, source),
    )


def _probe(run: "Run", model: nnx.Module, source: Any) -> _study.Probe:
    """Returns the model on the first images, in batches of those that the report looks at."""
    wanted = _PROBED_IMAGES if source.image_shape[0] <= _PHOTOGRAPH else _OF_PHOTOGRAPHS
    count = min(wanted, len(source)) // _IMAGES * _IMAGES or len(source)
    batch = source.first(count)
    (images,) = map(np.asarray, run.task.inputs(batch))
    return _study.probe(model, np.split(images, max(1, count // _IMAGES)), batch["label"])


def _answers(run: "Run", model: nnx.Module, source: Any) -> _study.Answers:
    """Returns what a model answers on the whole split; of records that cannot be read, nothing."""
    from adder_flax.data import EvalPipeline

    inputs = run.task.inputs
    answer = jax.jit(lambda model, batch: jax.nn.softmax(model(*inputs(batch)), -1))
    probabilities, labels, records, start = [], [], [], 0
    for batch in EvalPipeline(source, min(run.config.eval_batch_size, len(source))):
        there = np.flatnonzero(batch.pop("mask"))
        probabilities.append(np.asarray(answer(model, batch), np.float32)[there])
        labels.append(batch["label"][there])
        records.append(start + there)
        start += len(batch["label"])
    names = [printable(name, limit=60) for name in source.label_names]
    pictures = lambda records: source.read(records)[0]["image"]
    joined = map(np.concatenate, (probabilities, labels, records))
    return _study.Answers(*joined, names=names, pictures=pictures)


@register_study("transduction")
def study_transduction(trained: Trained, baseline: Trained | None) -> SequenceStudy:
    """Looks at a sequence model on words from all over the evaluation split, which is in order."""
    from adder_flax.data import SequenceSource, require_kind

    task: Any = trained.run.task
    source = require_kind(SequenceSource, trained.run.eval_source, "this report")
    places = np.linspace(0, len(source) - 1, min(_WORDS, len(source)))
    batch, _ = source.read(places.round().astype(int))
    letters, phonemes = map(np.asarray, task.inputs(batch))
    look = lambda name, model: observe_sequences(name, model, task, batch)
    return SequenceStudy(
        subject=look(trained.name, trained.model),
        baseline=None if baseline is None else look(baseline.name, baseline.model),
        untrained=look("untrained", trained.run.model(trained.run.init()["params"])),
        sources=[source.text("source", row) for row in letters],
        targets=[source.text("target", row) for row in phonemes],
    )
