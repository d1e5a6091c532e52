"""The multiplicative transformer that heal_attention.py and heal_all.py begin from.

Six blocks of width 96, 300 epochs, on four fifths of the training split (nine tenths of sets other
than digits).
Command: python main.py --config=experiments/heal_teacher.py --config.seed=0
"""

from adder_flax.experiments import healing

get_config = healing.teacher
