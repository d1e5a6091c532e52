"""A folder that Hugging Face's libraries load.

Weights, configuration, what is done to images, and a model card.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adder_flax import data
from adder_flax.files import write_whole
from adder_flax.interop._files import weights_of
from adder_flax.models import VisionTransformer
from adder_flax.text import printable

_BICUBIC = 3  # Pillow's number
_CARD = """\
---
library_name: transformers
pipeline_tag: image-classification
tags: [vision, image-classification, {tag}]
---
# {title}

| measured on {data} | |
|---|---|
{measured}

| | |
|---|---|
{facts}

```python
{usage}
```
"""


def save_folder(
    model: VisionTransformer,
    folder: str | Path,
    *,
    label_names: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
    crop_ratio: float = 1.0,
    card: str = "",
) -> None:
    """Writes a folder that Hugging Face's ``AutoModelForImageClassification`` loads.

    ``from_pretrained`` makes the same classifier of it.

    Args:
      model: a multiplicative transformer that reads its class token; with a distillation token it
        becomes a ``DeiTForImageClassificationWithTeacher``, else a ``ViTForImageClassification``.
      folder: made where it is not there; files of the same names are replaced.
      label_names: of the classes.
      mean, std: by which each channel of images in [0, 1] is normalised.
      crop_ratio: side of the middle of a photograph that is taken, over its shorter side; images
        that are not square are taken whole.
      card: text of ``README.md``, see `model_card`; none is written where it is empty.

    Raises:
      ValueError: another kind of model, for which these libraries have no class.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> sizes = dict(image_size=8, patch_size=2, num_classes=2, width=8, depth=1, num_heads=2)
      >>> model = VisionTransformer(**sizes, rngs=nnx.Rngs(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_folder(model, folder, label_names=["cat", "dog"], mean=[0.5] * 3, std=[0.25] * 3)
      ...     sorted(path.name for path in Path(folder).iterdir())
      ['config.json', 'model.safetensors', 'preprocessor_config.json']
    """
    weights = weights_of(model, "hugging_face")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "model.safetensors", weights)
    _write_json(folder / "config.json", _config(model, label_names))
    preprocessing = _preprocessing(model.image_shape, mean, std, crop_ratio)
    _write_json(folder / "preprocessor_config.json", preprocessing)
    if card:
        write_whole(folder / "README.md", card.encode())


def _config(model: VisionTransformer, label_names: Sequence[str]) -> dict[str, Any]:
    height, width, channels = model.image_shape
    distilled = model.head_dist is not None
    pixels = model.patch_embed.proj.in_features // channels
    kind = "DeiTForImageClassificationWithTeacher" if distilled else "ViTForImageClassification"
    return {
        "architectures": [kind],
        "model_type": "deit" if distilled else "vit",
        "image_size": height if height == width else [height, width],
        "patch_size": math.isqrt(pixels),
        "num_channels": channels,
        "hidden_size": model.head.in_features,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": model.blocks[0].attention.num_heads,
        "intermediate_size": model.blocks[0].mlp.fc1.out_features,
        "hidden_act": "gelu",
        "layer_norm_eps": float(model.norm.epsilon),
        "qkv_bias": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(index): name for index, name in enumerate(label_names)},
        "label2id": {name: index for index, name in enumerate(label_names)},
        "problem_type": "single_label_classification",
    }


def _preprocessing(
    image_shape: tuple[int, int, int],
    mean: Sequence[float],
    std: Sequence[float],
    crop_ratio: float,
) -> dict[str, Any]:
    height, width, channels = image_shape
    size = {"height": height, "width": width}
    common = {
        "do_resize": True,
        "resample": _BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(map(float, mean)),
        "image_std": list(map(float, std)),
    }
    if height != width:
        return {"image_processor_type": "ViTImageProcessor", "size": size, **common}
    # The only one of theirs that resizes the shorter side to a length and takes the middle.
    shorter = {"shortest_edge": data.resized_side(height, crop_ratio)}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": shorter,
        "do_center_crop": True,
        "crop_size": size,
        "do_convert_rgb": channels == 3,
        **common,
    }


def model_card(
    title: str,
    *,
    data: str,
    measured: Mapping[str, float],
    facts: Mapping[str, Any],
    usage: str,
    distilled: bool = False,
) -> str:
    """Returns a model card in Markdown, with what was measured and nothing else.

    Args:
      title: of the model.
      data: name of the data set and of the split that was measured on.
      measured: scores by name, of that split.
      facts: further lines by name, such as the number of parameters.
      usage: lines of Python that load the model.
      distilled: whether it has a distillation token.

    >>> card = model_card("ViT", data="test", measured={"accuracy": 0.98}, facts={}, usage="")
    >>> card.splitlines()[9]
    '| accuracy | 0.9800 |'
    """
    row = lambda name, value: f"| {printable(name)} | {printable(value).replace('|', '/')} |"
    return _CARD.format(
        tag="deit" if distilled else "vit",
        title=printable(title),
        data=printable(data),
        measured="\n".join(row(name, f"{value:.4f}") for name, value in measured.items()),
        facts="\n".join(row(name, value) for name, value in facts.items()),
        usage=usage,
    )


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode())
