"""torch's side of the activations, which calibrates, against the numpy yardstick, which the kernels are held to."""

import numpy as np
import pytest
import reference_kernel

from ndp_device.common.activation import GELU_TANH, GPT_OSS, SILU, Activation

torch = pytest.importorskip("torch")
from ndp_device.calibration.calibrated import activated  # noqa: E402


@pytest.mark.parametrize("activation", [SILU, GPT_OSS, GELU_TANH, Activation(limit=10.0)], ids=str)
def test_torch_and_numpy_compute_one_activation(activation: Activation) -> None:
    rng = np.random.default_rng(0)
    gate, up = (rng.normal(0, 10, (8, 64)).astype(np.float32) for _ in range(2))
    got = activated(torch.from_numpy(gate), torch.from_numpy(up), activation).numpy()
    np.testing.assert_allclose(got, reference_kernel.activated(gate, up, activation), rtol=2e-5, atol=1e-5)
