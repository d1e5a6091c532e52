"""What the experiments share: DeiT's sizes, the three mechanisms, and one recipe per kind of data.

An experiment file is ``get_config = functools.partial(common.deit, mechanism, size)`` and a header that says what it
gives. The argument after the colon names the data: ``--config=experiments/adder_deit_tiny.py:cifar10``.

Sources: sizes and the ImageNet recipe, Touvron et al., "Training data-efficient image transformers", 2021 (DeiT);
the CIFAR recipe, Lee et al., "Vision Transformer for Small-Size Datasets", 2021.
"""

import ml_collections

# Width, number of heads; all have 12 blocks, MLP ratio 4, heads of 64.
SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}

MECHANISMS = {
    "multiplicative": dict(score="dot", qkv_linear="dense", proj_linear="dense", mlp_linear="dense"),
    "additive": dict(score="additive", qkv_linear="dense", proj_linear="dense", mlp_linear="dense"),
    # Patch embedding, the product of map and values, and the head stay multiplicative.
    "adder": dict(score="adder", qkv_linear="adder", proj_linear="adder", mlp_linear="adder"),
}

_MODEL = dict(
    depth=12,
    mlp_ratio=4.0,
    patch_size=16,
    # config.model.score: one for every block, or one per block: "adder,dot,adder,…".
    score_options=dict(),
    identity="auto",  # add I to the attention map: "on", "off", or "auto": on for adder scores only
    scale="auto",  # of scores: 1 for additive ones, "sqrt_dim" for the others; or "variance_matched"
    temperature=1.0,
    adder_options=dict(x_gradient="hardtanh", w_gradient="full", hardtanh_slope=1.0, norm="layernorm"),
    pooling="cls",
    key_block="auto",  # attention in blocks of so many keys, in memory linear in the tokens; "off" builds the maps
    dropout_rate=0.0,
    attention_dropout_rate=0.0,
    drop_path_rate=0.0,
    dtype="float32",
    remat=False,
)

# With --config.optimizer.name=cg_fac: arguments of kfac.cg_fac, and layers and curvature_interval.
_CG_FAC = dict(
    learning_rate=1.0,  # factor of the steps, which follow the schedule below relative to its peak
    layers="matrices",  # norms and embeddings are AdamW's then; or "all"
    curvature="kron",  # or "exact", "token"
    fisher="mc",  # or "empirical", "ggn", "enumerate"
    token_sharing="expand",  # or "reduce"
    solver="cg",
    max_iterations=2,
    curvature_interval=5,  # steps
    preconditioner_interval=10,  # steps; 0 is off
    damping=10.0,  # relative to the mean eigenvalue of each layer; small noisy batches want much
    damping_interval=0,  # steps between adaptations; 0 is off
    factor_decay=0.95,
    step="fixed",  # momentum and kl_clip as they are; or "quadratic", for large batches
    momentum=0.9,
    kl_clip=5e-4,  # docs/cg_fac.md has what others gave; 0 is off
    reject=False,
)

_OPTIMIZER = dict(
    name="adamw",
    learning_rate=1e-3,
    final_learning_rate=1e-5,
    warmup_epochs=5.0,
    weight_decay=0.05,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    momentum=0.9,  # of sgd
    clip_norm=1.0,
    adder_rate=0.0,  # AdderNet's η; 0 is off
    cg_fac=_CG_FAC,
)

# Fields of adder_flax.data.Augment.
_AUGMENT = dict(
    crop_padding=0,
    resized_crop_scale=(0.08, 1.0),  # () is off
    resized_crop_ratio=(3 / 4, 4 / 3),
    flip_probability=0.5,
    brightness=0.3,
    contrast=0.3,
    saturation=0.3,
    mixup_alpha=0.8,
    cutmix_alpha=1.0,
    mix_probability=1.0,
    erase_probability=0.25,
    label_smoothing=0.1,
)

_RUN = dict(
    seed=0,
    init_from="",  # a safetensors file of weights to start from: timm's, Hugging Face's or those of --mode=export
    batch_size=1024,  # of all devices together
    accumulation_steps=1,
    num_epochs=300.0,
    ema_decay=0.0,
    non_finite="stop",  # or "skip": leave out a batch whose loss or gradient is not finite
    eval_batch_size=512,
    # Steps between; 0 is once an epoch.
    eval_every_steps=0,
    checkpoint_every_steps=0,
    log_every_steps=10,
    profile_steps=(),  # (first, last): steps whose timeline is recorded under <workdir>/profile
    topology="",  # of --mode=compile: v5e:4x4, cpu:8, …; empty for the devices at hand
    attention_diagnostics=False,  # numbers of each block at logging steps, which then cost twice as much
    mesh=dict(data=-1, fsdp=1, tensor=1),
)


def deit(mechanism: str, size: str, data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration of a DeiT of one mechanism and size on one data set.

    Args:
      mechanism: ``multiplicative``, ``additive`` or ``adder``.
      size: ``tiny``, ``small`` or ``base``.
      data: ``digits`` (the default), ``cifar10``, ``cifar100``, ``folder``, ``fake`` or any TFDS
        image-classification set; sets without a recipe of their own get ImageNet's.
    """
    data = data or "digits"
    width, num_heads = SIZES[size]
    config = ml_collections.ConfigDict(
        dict(
            **_RUN,
            model=dict(width=width, num_heads=num_heads, **MECHANISMS[mechanism], **_MODEL),
            optimizer=_OPTIMIZER,
            data=dict(name=data, data_dir="", image_size=224, num_threads=0, on_unreadable="raise"),
            augment=_AUGMENT,
        )
    )
    _RECIPES.get(data, _imagenet)(config)
    return config


def _imagenet(config: ml_collections.ConfigDict) -> None:
    """DeiT's recipe less RandAugment and repeated augmentation."""
    config.model.drop_path_rate = 0.1


def _small_images(config: ml_collections.ConfigDict, crop_padding: int) -> None:
    """Shifts in place of resized crops and colour jitter."""
    config.augment.update(
        resized_crop_scale=(), crop_padding=crop_padding, brightness=0.0, contrast=0.0, saturation=0.0
    )


def _cifar(config: ml_collections.ConfigDict) -> None:
    _small_images(config, crop_padding=4)
    config.augment.mix_probability = 0.5
    config.data.image_size = 32
    config.model.patch_size = 4
    config.model.drop_path_rate = 0.1
    config.batch_size = 128
    config.num_epochs = 100.0
    config.optimizer.warmup_epochs = 10.0


def _digits(config: ml_collections.ConfigDict) -> None:
    """Slight zooms and shifts and nothing else: a mirrored or mixed digit is no digit."""
    _small_images(config, crop_padding=0)
    config.augment.update(
        resized_crop_scale=(0.8, 1.0),
        resized_crop_ratio=(0.9, 1.1),
        flip_probability=0.0,
        mixup_alpha=0.0,
        cutmix_alpha=0.0,
        erase_probability=0.0,
        label_smoothing=0.0,
    )
    config.data.image_size = 8
    config.model.patch_size = 2
    config.batch_size = 64
    config.eval_batch_size = 360
    config.num_epochs = 20.0
    config.optimizer.warmup_epochs = 1.0
    # Adder networks learn faster with larger rates (AdderNet, section 3.3); dense ones stall at 2e-3.
    config.optimizer.learning_rate = 2e-3 if config.model.score == "adder" else 5e-4


def _fake(config: ml_collections.ConfigDict) -> None:
    _small_images(config, crop_padding=4)
    config.data.image_size = 32
    config.model.patch_size = 4
    config.batch_size = 64
    config.num_epochs = 1.0
    config.optimizer.warmup_epochs = 0.0


_RECIPES = {"digits": _digits, "cifar10": _cifar, "cifar100": _cifar, "fake": _fake}
