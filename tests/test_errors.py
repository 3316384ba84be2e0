"""Wrong options are loud and name the nearest right one."""

import copy
import pickle

import pytest
import torch

import spinformer as sf


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
