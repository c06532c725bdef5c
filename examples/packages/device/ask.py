from pathlib import Path

import numpy as np

from vllm_ndp.device.client import DeviceClient, DeviceProcess

device = DeviceProcess.spawn(Path("model"), None, kernel="chip", hardware="none")
client = DeviceClient(device.address)
client.connect()
client.install_plan(1, np.full((2, 4), 1 << 4, np.uint8))  # [layers, experts]; bit 4: in full precision
client.activate_plan(1)
one = np.zeros(1, np.int32)
asked = client.begin_execute(0, 0, 0, np.ones((1, 128), "f4"), one, one, np.full(1, 16, "u1"), np.ones(1, "f4"))
answer = client.finish_execute(asked)
print(f"norm {np.linalg.norm(answer.y):.4f}, simulated time: {answer.timing}, fallbacks: {client.counters.unavailable}")
client.close()
device.terminate()
