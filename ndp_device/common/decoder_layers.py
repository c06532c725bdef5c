"""GPU work in one decoder layer beside its routed experts, by sizes: attention of each form, a dense FFN.

Every form gives the same figures: its projections, its cache per token, its state per request, and the FLOPs on top of
the projections. Norms, biases and rotary embeddings are left out: below a thousandth of a layer.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ndp_device.common.errors import ConfigError


class _Form(msgspec.Struct, frozen=True, kw_only=True, tag_field="form", tag=str.lower):
    """Sizes of one form; those named in `_may_be_zero` may be 0, the others must be at least 1."""

    _may_be_zero: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, bool) and value < (name not in self._may_be_zero):
                raise ConfigError(f"{type(self).__name__}: {name} must be at least 1, got {value}")

    @property
    def kv_values(self) -> int:
        """Numbers that are cached for one token."""
        return 0

    def values_read(self, rows: int, kv_tokens: int) -> int:
        """Numbers of the cache that a step of so many rows reads, of `kv_tokens` cached tokens."""
        return kv_tokens * self.kv_values

    @property
    def state_values(self) -> int:
        """Numbers of state of one request, which every step reads and writes."""
        return 0

    @property
    def window(self) -> int:
        """How many tokens back a row looks, itself included; 0 = all."""
        return 0

    @property
    def is_chunked(self) -> bool:
        """Whether the window is a chunk of the text: a row sees its own chunk, from its start."""
        return False


class GroupedQuery(_Form, frozen=True, kw_only=True):
    """Softmax attention with query heads that share key-value heads."""

    _may_be_zero: ClassVar[frozenset[str]] = frozenset({"reach", "gate_dim", "query_rank", "sinks"})

    num_heads: int
    num_kv_heads: int
    head_dim: int
    reach: int = 0
    """Tokens of the window; 0 = all tokens before."""
    chunked: bool = False
    gate_dim: int = 0
    """How many numbers gate a head's output: its dimension, 1, or 0 for no gate."""
    one_projection: bool = False
    """Whether keys and values come from one projection; they are cached apart all the same."""
    query_rank: int = 0
    """How wide a query is before its second projection (Step-3); 0: it has one."""
    sinks: int = 0
    """Learned keys and values that every row attends to (Pangu-Pro-MoE v2)."""

    def weights(self, hidden: int) -> int:
        """Query, gate, key, value and output projections; keys and values of sinks."""
        heads, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        query = self.query_rank * (hidden + heads) if self.query_rank else hidden * heads
        others = heads + self.num_heads * self.gate_dim + (1 if self.one_projection else 2) * key_value
        return query + hidden * others + 2 * self.sinks * key_value

    @property
    def kv_values(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def window(self) -> int:
        return self.reach

    @property
    def is_chunked(self) -> bool:
        return self.chunked

    def flops(self, rows: int, kv_tokens: int, pairs: int) -> int:
        """FLOPs of `rows` rows with `pairs` (row, cached token) pairs: scores and the sum of values."""
        return 4 * (pairs + rows * self.sinks) * self.num_heads * self.head_dim


class Latent(_Form, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek, Kimi): one compressed vector per token is cached.

    query_rank 0: queries are not compressed.

    With an indexer (DeepSeek-V3.2) a row attends to `index_reach` tokens that a small attention finds, and 0 means all.
    A layer without index_heads attends to what the layer before has found.
    """

    _may_be_zero: ClassVar[frozenset[str]] = frozenset({"query_rank", "index_heads", "index_dim", "index_reach"})

    num_heads: int
    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int = 0
    index_dim: int = 0
    index_reach: int = 0

    def weights(self, hidden: int) -> int:
        """Queries, compression and expansion of keys and values, output; an indexer's three projections."""
        query = self.num_heads * (self.nope_dim + self.rope_dim)
        return (
            ((hidden + query) * self.query_rank if self.query_rank else hidden * query)
            + hidden * (self.kv_rank + self.rope_dim)
            + self._expansion
            + self.num_heads * self.value_dim * hidden
            + self.index_heads * self.index_dim * self.query_rank
            + hidden * (self.index_dim + self.index_heads)
        )

    @property
    def _expansion(self) -> int:
        return self.kv_rank * self.num_heads * (self.nope_dim + self.value_dim)

    @property
    def kv_values(self) -> int:
        return self.kv_rank + self.rope_dim + self.index_dim

    def values_read(self, rows: int, kv_tokens: int) -> int:
        """All keys of the indexer, and the vectors of the tokens found."""
        found = min(kv_tokens, rows * self.index_reach) if self.index_reach else kv_tokens
        return found * (self.kv_rank + self.rope_dim) + kv_tokens * self.index_dim

    def flops(self, rows: int, kv_tokens: int, pairs: int) -> int:
        """The cheaper of two ways, as engines choose: attend to the compressed vectors, or expand them first; and the
        indexer's scores.

        The rows' own expansion is among the projections.
        """
        found = min(pairs, rows * self.index_reach) if self.index_reach else pairs
        absorbed = 2 * found * self.num_heads * (2 * self.kv_rank + self.rope_dim)
        expanded = 2 * pairs * self.num_heads * (self.nope_dim + self.rope_dim + self.value_dim)
        expanded += 2 * max(kv_tokens - rows, 0) * self._expansion
        return min(absorbed, expanded) + 2 * pairs * self.index_heads * self.index_dim


class GatedDelta(_Form, frozen=True, kw_only=True):
    """Gated delta rule (Qwen3-Next): a key_dim x value_dim matrix per value head, behind a short convolution."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def _channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def weights(self, hidden: int) -> int:
        """Queries, keys, values, output gate and two scalars per head; the convolution; output."""
        values = self.num_value_heads * self.value_dim
        return (
            hidden * (self._channels + values + 2 * self.num_value_heads)
            + self._channels * self.kernel
            + (values * hidden)
        )

    @property
    def _matrix(self) -> int:
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def state_values(self) -> int:
        return self._matrix + self._channels * (self.kernel - 1)

    def flops(self, rows: int, kv_tokens: int, pairs: int) -> int:
        """Per number of the matrix: decay 1, read with the key 2, add the correction 2, read with the query 2."""
        return 7 * rows * self._matrix


class StateSpace(_Form, frozen=True, kw_only=True):
    """Mamba-2 (Granite hybrid): a head_dim x state matrix per head, behind a short convolution."""

    num_heads: int
    head_dim: int
    state: int
    groups: int
    kernel: int

    @property
    def _inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def _channels(self) -> int:
        return self._inner + 2 * self.groups * self.state

    def weights(self, hidden: int) -> int:
        """Gate, inputs of the convolution and a step size per head; the convolution; output."""
        projected = self._inner + self._channels + self.num_heads
        return hidden * projected + self._channels * self.kernel + self._inner * hidden

    @property
    def state_values(self) -> int:
        return self._inner * self.state + self._channels * (self.kernel - 1)

    def flops(self, rows: int, kv_tokens: int, pairs: int) -> int:
        """Per number of the state: decay 1, add the input 2, read 2."""
        return 5 * rows * self._inner * self.state


class SelectiveScan(_Form, frozen=True, kw_only=True):
    """Mamba-1 (Jamba): `state` numbers per inner channel, behind a short convolution."""

    inner: int
    state: int
    step_rank: int
    kernel: int

    def weights(self, hidden: int) -> int:
        """Inputs and gate, what steps and state are computed from, the convolution and the decays; output."""
        from_inner = self.step_rank + 2 * self.state
        return (
            hidden * 2 * self.inner
            + self.inner * (from_inner + self.step_rank + self.kernel + self.state)
            + (self.inner * hidden)
        )

    @property
    def state_values(self) -> int:
        return self.inner * (self.state + self.kernel - 1)

    def flops(self, rows: int, kv_tokens: int, pairs: int) -> int:
        """Per number of the state: decay 1, add the input 2, read 2."""
        return 5 * rows * self.inner * self.state


class Convolution(_Form, frozen=True, kw_only=True):
    """A short convolution over `inner` channels, gated before and after (LFM2)."""

    inner: int
    kernel: int

    def weights(self, hidden: int) -> int:
        """Two gates and the input; the convolution; output."""
        return self.inner * (3 * hidden + self.kernel + hidden)

    @property
    def state_values(self) -> int:
        return self.inner * (self.kernel - 1)

    def flops(self, rows: int, kv_tokens: int, pairs: int) -> int:
        """Both gates; the convolution is among the projections."""
        return 2 * rows * self.inner


Attention = GroupedQuery | Latent | GatedDelta | StateSpace | SelectiveScan | Convolution


class DecoderLayer(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder layer: its attention, and either routed experts or a dense FFN of so many weights."""

    attention: Attention
    dense_weights: int = 0

    def __post_init__(self) -> None:
        if self.dense_weights < 0:
            raise ConfigError(f"a decoder layer cannot have {self.dense_weights} dense weights")

    @property
    def has_experts(self) -> bool:
        return self.dense_weights == 0
