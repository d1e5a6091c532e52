"""How far attention reaches, and the maps themselves."""

from typing import Any

import numpy as np

from adder_flax.measures.maps import entropy, mean_distance, patch_attention
from adder_flax.report import _style
from adder_flax.report._families import ADDER, register_claims
from adder_flax.report._study import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_MEASURED,
    Claim,
    Findings,
    Picture,
    Study,
    only_when,
)
from adder_flax.report.figures import attention_figure, comparison_figure

_SOURCE = ADDER.source


@register_claims("maps", ADDER)
def judge(study: Study) -> Findings:
    """Entropy and distance against the baseline's, and pictures of maps."""
    return Findings([_global_claim(study)], [_map_picture(study), *_attention_pictures(study)])


def _global_claim(study: Study) -> Claim:
    name, source = "adder-global", f"{_SOURCE}, A.4"
    statement = "Adder maps focus more on the global information than multiplicative ones."
    pair = study.adder_and_dot
    if pair is None:
        return Claim(
            name,
            source,
            statement,
            NOT_MEASURED,
            "",
            "Needs an adder model and a multiplicative baseline.",
        )
    entropies = [np.mean([entropy(block).mean() for block in subject.maps]) for subject in pair]
    distances = lambda subject: [
        mean_distance(block, study.grid, prefix_tokens=subject.prefix_tokens).mean()
        for block in subject.maps
    ]
    reach = [np.mean(distances(subject)) for subject in pair]
    wider = entropies[0] > entropies[1], reach[0] > reach[1]
    verdict = HOLDS if all(wider) else DOES_NOT_HOLD
    if any(wider) and not all(wider):
        verdict = only_when("entropy is meant" if wider[0] else "distance is meant")
    return Claim(
        name,
        source,
        statement,
        verdict,
        f"{entropies[0]:.2f} against {entropies[1]:.2f} nats; {reach[0]:.2f} against "
        f"{reach[1]:.2f} patches",
        f"Mean entropy of the rows: adder {entropies[0]:.3f} nats, multiplicative "
        f"{entropies[1]:.3f}; mean distance that attention reaches: {reach[0]:.3f} and "
        f"{reach[1]:.3f} patches.",
        "class-attention",
        margins=(float(entropies[0] - entropies[1]), float(reach[0] - reach[1])),
    )


def _map_picture(study: Study) -> Picture:
    chosen = study.subject.blocks(1, 6, 11)
    figure, axes = _style.new_figure(2.9 * len(chosen), 3.1, 1, len(chosen))
    data = {}
    for axis, index in zip(axes[0], chosen, strict=True):
        matrix = study.subject.walks[index][0, 0]
        image = axis.imshow(matrix, cmap=_style.HEAT, vmin=0)
        figure.colorbar(image, ax=axis, shrink=0.8).ax.tick_params(labelsize=7)
        _style.bare(axis, title=f"block {index + 1}, head 1", note="key →")
        axis.set_ylabel("← query", fontsize=8)
        data[f"block_{index + 1}_head_1"] = matrix
    return Picture(
        "maps",
        figure,
        "Whole attention maps of the first image (the paper's figure 2), identity taken off; "
        "brighter is more weight, each map with its own scale. A symmetric map would equal its "
        "mirror image in the falling diagonal.",
        "Attention maps as matrices for three blocks.",
        data,
    )


def _attention_pictures(study: Study) -> list[Picture]:
    """The paper's figure 3, of both models where there are two.

    Else it is of the one, with rollout beside it.
    """
    models = {subject.name: subject for subject in filter(None, (study.baseline, study.subject))}
    shown = min(4 if len(models) == 1 else 3, len(study.pictures))
    blocks = study.subject.blocks(3, 6, 10)
    options: dict[str, Any] = dict(
        **study.subject.in_front,
        captions=study.captions[:shown],
        with_rollout=True,
    )
    maps = {name: [block[:shown] for block in subject.maps] for name, subject in models.items()}
    if len(models) == 1:
        [(name, only)] = maps.items()
        figure = attention_figure(
            study.pictures[:shown], only, blocks=blocks, title=name, **options
        )
    else:
        figure = comparison_figure(study.pictures[:shown], maps, blocks=blocks, **options)
    data = {
        f"{name}, block {index + 1}": patch_attention(subject.maps[index], **subject.in_front)
        for name, subject in models.items()
        for index in subject.blocks(3, 6, 10)
    }
    who = f"{' (upper rows) and '.join(models)}"
    who += " (lower rows) look" if len(models) > 1 else " looks"
    caption = (
        f"Where {who} from the class token (the paper's figure 3), mean of the heads, and the "
        "rollout through all blocks, in which the residual counts once and the identity map as the "
        "shortcut it is."
    )
    alt = (
        "Test images with attention drawn over them for three blocks, and rollout, one row for "
        "each model."
    )
    return [Picture("class-attention", figure, caption, alt, data)]
