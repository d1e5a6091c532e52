"""How many cases Hypothesis draws: few by default, ``HYPOTHESIS_PROFILE=many`` for a long look."""

import os

import hypothesis

_COMMON = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
hypothesis.settings.register_profile("few", max_examples=12, derandomize=True, **_COMMON)
hypothesis.settings.register_profile("many", max_examples=500, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))
