"""Second-order optimization for JAX.

Nothing but the name is shared with the distribution ``kfac`` of PyPI, which is for TensorFlow: both
install a package ``kfac``, so they cannot stand in one environment.
"""

# Refuses the other one before anything else is imported.
from kfac import _distribution as _distribution
from kfac._checks import Report as Report
from kfac._checks import Spectrum as Spectrum
from kfac._checks import spectrum as spectrum
from kfac._checks import verify as verify
from kfac.curvature._capture import path_of as path_of
from kfac.curvature._capture import scan as scan
from kfac.curvature._capture import tap as tap
from kfac.curvature._coverage import Layers as Layers
from kfac.curvature._coverage import curvature_stride as curvature_stride
from kfac.curvature._coverage import find_layers as find_layers
from kfac.curvature._fisher import Likelihood as Likelihood
from kfac.curvature._gather import Curvature as Curvature
from kfac.curvature._gather import concatenate_curvature as concatenate_curvature
from kfac.curvature._gather import curvature as curvature
from kfac.curvature._gather import value_grad_and_curvature as value_grad_and_curvature
from kfac.curvature._layers import Dense as Dense
from kfac.curvature._layers import Generic as Generic
from kfac.curvature._layers import L1Dense as L1Dense
from kfac.curvature._layers import Readout as Readout
from kfac.curvature._layers import Scale as Scale
from kfac.curvature._registry import register_layer as register_layer
from kfac.solve._solvers import cg as cg
from kfac.step._optimizers import algorithm_1 as algorithm_1
from kfac.step._optimizers import cg_fac as cg_fac
from kfac.step._optimizers import kfac as kfac
from kfac.step._optimizers import scale_by_cg_fac as scale_by_cg_fac
from kfac.step._optimizers import scale_by_kfac as scale_by_kfac
from kfac.step._state import Averages as Averages
from kfac.step._state import CgFacOptions as CgFacOptions
from kfac.step._state import KfacOptions as KfacOptions
from kfac.step._state import State as State
from kfac.step._state import Stats as Stats
from kfac.step._state import find_state as find_state
from kfac.step._state import find_stats as find_stats
from kfac.step._state import telemetry as telemetry
