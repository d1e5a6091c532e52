"""How far attention reaches, and the maps themselves."""

from typing import Any

import numpy as np

from adder_flax.measures.maps import entropy, mean_distance, patch_attention
from adder_flax.report import _style
from adder_flax.report._families import ADDER, only_when, register_claims
from adder_flax.report._study import (
    NOT_MEASURED,
    TOLERANCE,
    Claim,
    Findings,
    Picture,
    Study,
    Subject,
)
from adder_flax.report.figures import comparison_figure

_STATEMENTS = {
    "adder-global": "Adder maps focus more on the global information than multiplicative ones.",
    "object-layers": "In both models some layers focus on the object, others on the context.",
    "object-layers-differ": (
        "The layer that focuses on the object most is another one in the adder model."
    ),
}


@register_claims("maps", ADDER)
def judge(study: Study) -> Findings:
    """Entropy and distance against the baseline's, and pictures of maps."""
    if pair := study.adder_and_dot:
        claims = _pair_claims(study, pair)
    else:
        finding = "Needs an adder model and a multiplicative baseline."
        claims = [_claim(name, NOT_MEASURED, finding=finding) for name in _STATEMENTS]
    return Findings(claims, [_map_picture(study), _attention_picture(study)])


def _claim(name: str, *found: Any, **options: Any) -> Claim:
    return ADDER.claim(name, "A.4", _STATEMENTS[name], *found, **options)


def _pair_claims(study: Study, pair: tuple[Subject, Subject]) -> list[Claim]:
    adder, dot = (np.mean([entropy(block).mean() for block in each.maps]) for each in pair)
    reach = lambda block, each: mean_distance(block, study.grid, prefix_tokens=each.prefix_tokens)
    far, near = (np.mean([reach(block, each).mean() for block in each.maps]) for each in pair)
    wider, farther = adder > dot, far > near
    condition = only_when("entropy is meant" if wider else "distance is meant")
    named = zip(("adder", "multiplicative"), pair, strict=True)
    focus = {name: np.array([_focus(study, each, b) for b in each.maps]) for name, each in named}
    tops = {name: of.argmax() + 1 for name, of in focus.items()}
    of_each = lambda show: "; ".join(f"{name} {show(of)}" for name, of in focus.items())
    blocks = of_each(lambda of: ", ".join(f"{value:.2f}" for value in of))
    finding = (
        f"Attention on pixels unlike the border's, over uniform attention, by block: {blocks}."
    )
    return [
        _claim(
            "adder-global",
            condition if wider != farther else wider,
            f"{adder:.2f} against {dot:.2f} nats; {far:.2f} against {near:.2f} patches",
            f"Mean entropy of the rows: adder {adder:.3f} nats, multiplicative {dot:.3f}; mean "
            f"distance that attention reaches: {far:.3f} and {near:.3f} patches.",
            "class-attention",
            margins=(float(adder - dot), float(far - near)),
        ),
        _claim(
            "object-layers",
            all(of.max() > 1 + TOLERANCE and of.min() < 1 for of in focus.values()),
            of_each(lambda of: f"{of.min():.2f} to {of.max():.2f}"),
            finding,
            "class-attention",
        ),
        _claim(
            "object-layers-differ",
            len(set(tops.values())) > 1,
            ", ".join(f"{name} block {top}" for name, top in tops.items()),
            finding,
            "class-attention",
        ),
    ]


def _focus(study: Study, subject: Subject, maps: np.ndarray) -> float:
    """Returns the class token's attention on the object, over what uniform attention has there.

    The object is what differs from the median of the image's border by more than half of what the
    pixel that differs most does.
    """
    pictures = study.pictures.astype(float)
    edges = pictures[:, [0, -1]], pictures[:, :, [0, -1]]
    flat = [edge.reshape(len(pictures), -1, pictures.shape[-1]) for edge in edges]
    border = np.concatenate(flat, axis=1)
    unlike = np.abs(pictures - np.median(border, axis=1)[:, None, None]).max(-1)
    thing = unlike > unlike.max((1, 2), keepdims=True) / 2
    (rows, columns), (height, width) = study.grid, thing.shape[1:]
    patches = thing.reshape(-1, rows, height // rows, columns, width // columns).mean((2, 4))
    share = patches.reshape(len(patches), 1, -1)
    seen = share.any((1, 2))  # a picture of one colour has no object
    attended = patch_attention(maps, **subject.in_front)[seen]
    return float(np.mean((attended * share[seen]).sum(-1) / share[seen].mean(-1)))


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


def _attention_picture(study: Study) -> Picture:
    models = {subject.name: subject for subject in filter(None, (study.baseline, study.subject))}
    alone = len(models) == 1
    shown, blocks = min(4 if alone else 3, len(study.pictures)), study.subject.blocks(3, 6, 10)
    options = study.subject.in_front | {"blocks": blocks, "captions": study.captions[:shown]}
    maps = {name: [block[:shown] for block in subject.maps] for name, subject in models.items()}
    # Of one model the name stands above, not at each row.
    rows = {"": maps[study.subject.name]} if alone else maps
    figure = comparison_figure(study.pictures[:shown], rows, with_rollout=True, **options)
    _style.headline(figure, study.subject.name if alone else "")
    data = {
        f"{name}, block {index + 1}": patch_attention(subject.maps[index], **subject.in_front)
        for name, subject in models.items()
        for index in subject.blocks(3, 6, 10)
    }
    who = " (upper rows) and ".join(models) + (" looks" if alone else " (lower rows) look")
    place = "the class token" if study.subject.in_front["class_token"] else "the mean patch"
    return Picture(
        "class-attention",
        figure,
        f"Where {who} from {place} (the paper's figure 3), mean of the heads, and the rollout "
        "through all blocks, in which the residual counts once and the identity map as the "
        "shortcut it is.",
        "Test images with attention drawn over them for three blocks, and rollout, one row for "
        "each model.",
        data,
    )
