"""The autoencoder of digits on which second-order optimizers are compared.

64-48-24-8-24-48-64 units, tanh, a linear code of 8 numbers; sigmoid cross-entropy in nats an image.

Source: Hinton and Salakhutdinov, "Reducing the dimensionality of data with neural networks", 2006;
Martens, "Deep learning via Hessian-free optimization", 2010; on scikit-learn's digits with one
layer less and tanh units.
Commands:
    python main.py --config=experiments/autoencoder.py
    python main.py --config=experiments/autoencoder.py --config.optimizer.name=kfac
The other optimizers go by their names likewise; schedule_free_adamw takes
--config.optimizer.schedule=constant too. The argument after the colon is a data set of images of
one size, experiments/autoencoder.py:mnist, or folder with --config.data.image_size=64.
Measured: after 250 steps 17.9 ± 0.3 nats an image of the test split with AdamW and 16.7 ± 0.1 with
K-FAC whose steps are shares, --config.optimizer.kfac.step=share (mean and standard deviation of
--config.seed=0 to 5); 6 and 21 seconds on one core of an Intel Xeon with AVX-512, most of them
compilation.
"""

import ml_collections

from adder_flax import models, settings, tasks


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration on a data set of images, ``digits`` unless given."""
    config = ml_collections.ConfigDict(settings.defaults(settings.RunSettings))
    config.model = settings.defaults(models.AutoencoderSettings)
    config.task = settings.defaults(tasks.ReconstructionSettings)
    config.data.update(name=data or "digits", image_size=0)
    config.batch_size = 256
    config.num_epochs = 50.0
    # An epoch of digits has 5 steps.
    config.update(eval_every_steps=25, checkpoint_every_steps=125)
    # Found on a fifth of the training images, in 200 steps of the others.
    config.optimizer.update(learning_rate=2e-2, warmup_epochs=10.0, weight_decay=0.0)
    return config
