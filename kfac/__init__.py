"""Second-order optimization for JAX.

Nothing but the name is shared with the distribution ``kfac`` of PyPI, which is for TensorFlow: both
install a package ``kfac``, so they cannot stand in one environment.
"""

# Refuses the other one before anything else is imported.
from kfac import _distribution as _distribution
from kfac._coverage import Layers as Layers
from kfac._coverage import curvature_stride as curvature_stride
from kfac._coverage import find_layers as find_layers
from kfac._curvature import Curvature as Curvature
from kfac._curvature import concatenate_curvature as concatenate_curvature
from kfac._curvature import curvature as curvature
from kfac._curvature import value_grad_and_curvature as value_grad_and_curvature
from kfac._fisher import Likelihood as Likelihood
from kfac._layers import Dense as Dense
from kfac._layers import Generic as Generic
from kfac._layers import L1Dense as L1Dense
from kfac._layers import Readout as Readout
from kfac._layers import Scale as Scale
from kfac._optimizers import algorithm_1 as algorithm_1
from kfac._optimizers import cg_fac as cg_fac
from kfac._optimizers import kfac as kfac
from kfac._options import CgFacOptions as CgFacOptions
from kfac._options import KfacOptions as KfacOptions
from kfac._plain import path_of as path_of
from kfac._plain import scan as scan
from kfac._plain import tap as tap
from kfac._registry import register_layer as register_layer
from kfac._solver import cg as cg
from kfac._state import Averages as Averages
from kfac._state import State as State
from kfac._state import Stats as Stats
from kfac._state import find_state as find_state
from kfac._state import find_stats as find_stats
from kfac._state import telemetry as telemetry
from kfac._transform import scale_by_cg_fac as scale_by_cg_fac
from kfac._transform import scale_by_kfac as scale_by_kfac
from kfac._verify import Report as Report
from kfac._verify import verify as verify
