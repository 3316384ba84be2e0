"""Wrong options are loud and name the nearest right one."""

import copy
import pickle
import re

import pytest
import torch

import spinformer as sf
from spinformer.dynamics import ParallelDynamics


@pytest.mark.parametrize(
    ("build", "named", "nearest"),
    [
        (lambda: sf.MeanField(dampning=0.5), "dampning", "damping"),
        (lambda: sf.Sphere(3, radus=1.0), "radus", "radius"),
        (lambda: sf.SpinSystem(torch.eye(2), torch.ones(2, 1), temperature=1.0), "temperature", ""),
        (lambda: sf.MeanField(nonsense=1), "nonsense", "tolerance"),
    ],
)
def test_unknown_option_raises_type_error(build, named, nearest):
    with pytest.raises(TypeError, match=named) as caught:
        build()
    assert nearest in str(caught.value)


def test_unknown_choice_names_the_nearest():
    with pytest.raises(ValueError, match="'aderson'.*nearest is 'anderson'"):
        sf.MeanField(solver="aderson")


def test_checked_constructors_keep_their_signature_and_pickle():
    site = sf.Sphere(3, radius=2.0)
    for twin in (copy.deepcopy(site), pickle.loads(pickle.dumps(site))):
        assert repr(twin) == repr(site)
    assert sf.Sphere.__init__.__wrapped__.__name__ == "__init__"


def test_warnings_point_at_the_line_that_called_the_library():
    """Also through decorators of torch, and from any depth inside."""
    system = sf.SpinSystem(2 * torch.ones(8, 8) / 8, torch.full((8, 1), 0.05), site=sf.Ising())
    with pytest.warns(sf.errors.ConvergenceWarning) as caught:
        sf.MeanField(max_iterations=1, on_failure="warn").solve(system)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(sf.errors.ConvergenceWarning) as caught:
        ParallelDynamics(steps=40, warmup=0).steady_state(system, initial="ordered")
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("batch", "norm='batch' is not an option (choose from 'layer', 'rms', None)"),
        (
            "Layers",
            "norm='Layers' is not an option; the nearest is 'layer' "
            "(choose from 'layer', 'rms', None)",
        ),
    ],
)
def test_what_is_not_near_is_not_suggested(value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sf.errors.check_choice("norm", value, ("layer", "rms"), optional=True)
    with pytest.raises(ValueError, match=r"\(choose from 'layer', 'rms'\)$"):
        sf.errors.check_choice("norm", value, ("layer", "rms"))
    assert sf.errors.check_choice("norm", "rms", ("layer", "rms"), optional=True) == "rms"
    assert sf.errors.check_choice("norm", None, ("layer", "rms"), optional=True) is None
