import numpy as np

from vllm_ndp.traces.importers import sequence_of, trace_of


def read(source, settings):
    """Lines `request,token,layer,expert,weight`; a request's first `settings.prompt_len` tokens are its prompt."""
    rows = np.loadtxt(source, delimiter=",")
    sequences = []
    for request in np.unique(rows[:, 0]):
        own = rows[rows[:, 0] == request]
        tokens, layers = int(own[:, 1].max()) + 1, int(own[:, 2].max()) + 1
        ids = own[:, 3].astype(np.int64).reshape(tokens, layers, -1)
        weights = own[:, 4].astype(np.float32).reshape(ids.shape)
        sequences.append(sequence_of(ids, weights, settings.prompt_len, f"csv {int(request)}"))
    return trace_of(sequences, settings, "csv", "router")
