"""Native experts that share planes: of one container, and masked ones."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawn_experts import SHAPES, full_expert, random_biases, random_expert, random_pairs

from ndp_device.common.activation import GPT_OSS
from ndp_device.common.widths import LIMBS
from ndp_device.experts.expert import NestedMatrix, QuantizedExpert, QuantizedMatrix
from ndp_device.kernels import _native
from ndp_device.kernels.native import NativeKernel

ISAS = _native.supported_isas()


def nested_replicas(
    rng: np.random.Generator, hidden: int, intermediate: int, group: int = 32, *, perm: bool = False
) -> dict[int, QuantizedExpert]:
    """All widths of one container: planes and order are shared, scales and offsets are each width's own."""
    whole = random_expert(rng, hidden, intermediate, 4, group, perm=perm)

    def nested(m: QuantizedMatrix) -> NestedMatrix:
        own = [np.float16(1 + bits / 8) for bits in (1, 2, 3, 4)]
        scale, offset = (np.stack([values * one for one in own]) for values in (m.scale, m.offset))
        return NestedMatrix((1, 2, 3, 4), m.planes, scale, offset, m.group_size, m.perm)

    w13, w2 = nested(whole.w13), nested(whole.w2)
    return {bits: QuantizedExpert(bits, w13.at(bits), w2.at(bits)) for bits in (1, 2, 3, 4)}


def test_what_is_prepared_of_a_matrix_alone_keeps_none_of_its_planes() -> None:
    """Codes that were unpacked into memory would be held twice: a model of 15 GB took 31 and ended its machine."""
    expert = random_expert(np.random.default_rng(7), 64, 96, 4, 32)
    planes = [weakref.ref(expert.w13.planes), weakref.ref(expert.w2.planes)]
    prepared = NativeKernel(threads=1).prepare(expert)
    del expert
    gc.collect()
    assert [one() for one in planes] == [None, None]
    assert prepared.nbytes > 0


def test_replicas_of_one_container_share_their_top_planes_until_the_last_is_gone() -> None:
    replicas = nested_replicas(np.random.default_rng(7), 64, 96)
    kernel = NativeKernel(threads=1)
    prepared = {bits: kernel.prepare(replica) for bits, replica in replicas.items()}
    assert prepared[2].components[0] is prepared[3].components[0] is prepared[4].components[0]
    assert len(kernel._shared) == 2 * 4  # per matrix: {1}, {2} and what 3 and 4 bits add to it
    weights = 3 * 64 * 96
    assert [prepared[bits].nbytes - prepared[bits].scale_bytes for bits in (1, 2, 3, 4)] == [
        weights * bits // 8 for bits in (1, 2, 3, 4)
    ]
    prepared.clear()
    gc.collect()
    assert len(kernel._shared) == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("limbs", [2, 1])
@pytest.mark.parametrize(("narrow", "wide"), [(3, 4), (1, 2), (1, 4)])
@pytest.mark.parametrize(("hidden", "intermediate", "group", "perm"), SHAPES)
@pytest.mark.parametrize(("kind", "sizes"), [("plain", (1.0, 1e-37)), ("gpt-oss", (1.0,)), ("subnormal", (1e4,))])
def test_a_masked_expert_computes_the_same_bits(
    isa: str,
    limbs: int,
    narrow: int,
    wide: int,
    hidden: int,
    intermediate: int,
    group: int,
    perm: bool,
    kind: str,
    sizes: tuple[float, ...],
) -> None:
    """A result must not depend on how full the memory was, whatever the biases, activation and scales.

    fp16 below 6e-5 is subnormal: halving there would lose the last bit. So are activations of 1e-37 no normal numbers.
    """
    rng = np.random.default_rng([narrow, wide, hidden, intermediate, group])
    replicas = nested_replicas(rng, hidden, intermediate, group, perm=perm)
    if kind == "gpt-oss":
        more: Any = {"biases": random_biases(rng, hidden, intermediate), "activation": GPT_OSS}
        replicas = {bits: replace(expert, **more) for bits, expert in replicas.items()}
    if kind == "subnormal":
        for matrix in (replicas[narrow].w13, replicas[narrow].w2):
            matrix.scale[...] = rng.integers(1, 64, matrix.scale.shape, dtype=np.uint16).view(np.float16)
            matrix.offset[...] = -rng.integers(1, 64, matrix.scale.shape, dtype=np.uint16).view(np.float16)
    kernel = NativeKernel(dict.fromkeys(LIMBS, limbs), isa=isa, threads=2)
    own = kernel.prepare(replicas[narrow])
    masked = kernel.masked(own, kernel.prepare(replicas[wide]))
    assert masked is not None
    for tokens in (1, 2, 3, 4, 5, 9, 17, 40):
        for size in sizes:
            x = (size * rng.standard_normal((tokens, hidden))).astype(np.float32)
            pairs = random_pairs(rng, tokens, 1, 1)
            expected = kernel.execute(x, [own], *pairs)
            assert expected.any() or size < 1
            np.testing.assert_array_equal(kernel.execute(x, [masked], *pairs), expected)


def test_masked_replicas_of_every_width_take_what_the_widest_and_the_scales_take() -> None:
    replicas = nested_replicas(np.random.default_rng(10), 64, 96)
    kernel = NativeKernel(threads=1)
    prepared = {bits: kernel.prepare(replica) for bits, replica in replicas.items()}
    for narrow, wide in ((3, 4), (1, 2)):
        masked = kernel.masked(prepared[narrow], prepared[wide])
        assert masked is not None
        prepared[narrow] = masked
    gc.collect()
    assert len(kernel._shared) == 2 * 2
    parts = dict(part for expert in prepared.values() for part in kernel.parts(expert))
    assert sum(parts.values()) == prepared[4].nbytes + sum(prepared[bits].scale_bytes for bits in (1, 2, 3))


def test_only_what_one_bit_more_of_the_same_planes_holds_can_be_masked() -> None:
    rng = np.random.default_rng(11)
    kernel = NativeKernel(threads=1)
    prepared = {bits: kernel.prepare(replica) for bits, replica in nested_replicas(rng, 64, 96).items()}
    others = {bits: kernel.prepare(replica) for bits, replica in nested_replicas(rng, 64, 96).items()}
    full = kernel.prepare(full_expert(rng, 64, 96, "float32"))
    possible = {(n, w) for n in prepared for w in prepared if kernel.masked(prepared[n], prepared[w]) is not None}
    assert possible == {(1, 2), (1, 3), (1, 4), (3, 4)}
    assert kernel.masked(prepared[3], others[4]) is None
    assert kernel.masked(prepared[3], full) is None
    assert kernel.masked(full, prepared[4]) is None
    with pytest.raises(ValueError, match="no kernel streams these components without their 1 lowest bits"):
        prepared[1].native.masked(*[[part.native] for part in prepared[1].components])
    two, one = (prepared[bits].components[0].native for bits in (2, 1))
    scale = np.zeros((192, 2), np.uint16)
    with pytest.raises(ValueError, match="no kernel streams these components"):
        kernel._engine.assemble([two, two, one], 192, 64, 2, 32, scale, scale, 32, np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="another matrix's size"):
        prepared[1].native.masked(*[[part.native] for part in reversed(prepared[2].components)])


def test_a_changed_copy_of_a_view_shares_no_component_with_the_matrix_it_came_from() -> None:
    """A part of an expert has other planes: it must not be taken for the whole one's."""
    replicas = nested_replicas(np.random.default_rng(9), 64, 96)
    whole, kernel = replicas[4], NativeKernel(threads=1)
    assert whole.w13.nested is replicas[1].w13.nested is not None
    turned = replace(whole, w13=replace(whole.w13, planes=np.ascontiguousarray(whole.w13.planes[:, ::-1])))
    assert turned.w13.nested is None
    first, other = kernel.prepare(whole), kernel.prepare(turned)
    assert not set(map(id, first.components[:2])) & set(map(id, other.components))
    assert first.components[2] is other.components[2]  # of w2, which is the same view


def test_a_matrix_of_an_expert_that_is_a_linear_layer_too_is_arranged_for_each() -> None:
    """Of w13 the kernel reads rows of gate and up in turn; of a linear layer, rows in order."""
    rng = np.random.default_rng(12)
    expert, kernel, alone = random_expert(rng, 64, 96, 4, 32), NativeKernel(threads=1), NativeKernel(threads=1)
    x, pairs = rng.standard_normal((2, 64)).astype(np.float32), random_pairs(rng, 2, 1, 1)
    held = kernel.prepare(expert), kernel.prepare_matrix(expert.w13)
    np.testing.assert_array_equal(
        kernel.execute(x, [held[0]], *pairs), alone.execute(x, [alone.prepare(expert)], *pairs)
    )
    gc.collect()
    np.testing.assert_array_equal(kernel.multiply(x, held[1]), alone.multiply(x, alone.prepare_matrix(expert.w13)))


def test_one_set_of_planes_in_other_groups_is_another_matrix() -> None:
    rng = np.random.default_rng(13)
    coarse, kernel = random_expert(rng, 64, 96, 4, 32), NativeKernel(threads=1)
    fine = replace(
        coarse,
        w13=random_groups(rng, coarse.w13, 16),
        w2=random_groups(rng, coarse.w2, 16),
    )
    x, pairs = rng.standard_normal((2, 64)).astype(np.float32), random_pairs(rng, 2, 1, 1)
    held = kernel.prepare(coarse), kernel.prepare(fine)
    for expert, prepared in zip((coarse, fine), held, strict=True):
        alone = NativeKernel(threads=1)
        np.testing.assert_array_equal(
            kernel.execute(x, [prepared], *pairs), alone.execute(x, [alone.prepare(expert)], *pairs)
        )


def random_groups(rng: np.random.Generator, matrix: QuantizedMatrix, group: int) -> QuantizedMatrix:
    rows, columns = matrix.shape
    scale, offset = (rng.uniform(-1, 1, (rows, columns // group)).astype(np.float16) for _ in range(2))
    return replace(matrix, scale=scale, offset=offset, group_size=group)


def test_a_matrix_that_is_gone_is_not_taken_for_one_in_its_place() -> None:
    """A new matrix may lie where one was whose components are in use still."""
    rng = np.random.default_rng(14)
    kernel, kept = NativeKernel(threads=1), []
    x, pairs = rng.standard_normal((2, 64)).astype(np.float32), random_pairs(rng, 2, 1, 1)
    for _ in range(20):
        expert, alone = random_expert(rng, 64, 96, 2, 32), NativeKernel(threads=1)
        kept.append(kernel.prepare(expert))
        np.testing.assert_array_equal(
            kernel.execute(x, [kept[-1]], *pairs), alone.execute(x, [alone.prepare(expert)], *pairs)
        )
        del expert


def test_widths_in_other_groups_are_not_nested() -> None:
    """24 columns are two groups of 12 or of 16: scales of one shape say nothing of it."""
    rng = np.random.default_rng(15)
    planes = rng.integers(0, 256, (4, 8, 3), dtype=np.uint8)
    scale = np.ones((8, 2), np.float16)
    narrow, wide = (QuantizedMatrix(b, planes[:b], scale, scale, group) for b, group in ((2, 12), (4, 16)))
    with pytest.raises(ValueError, match="2 bits are in groups of 12 columns, 4 bits in groups of 16"):
        NestedMatrix.of([narrow, wide])


def test_widths_that_are_views_of_one_matrix_need_no_proof_and_others_are_proven_to_nest() -> None:
    replicas = nested_replicas(np.random.default_rng(10), 64, 96)
    matrices = [replicas[bits].w13 for bits in (1, 2, 3, 4)]
    assert NestedMatrix.of(matrices) is matrices[0].nested
    copies = [replace(matrix, planes=matrix.planes.copy()) for matrix in matrices]
    again = NestedMatrix.of(copies)
    assert all((again.at(bits).scale == one.scale).all() for bits, one in zip((1, 2, 3, 4), matrices, strict=True))
    copies[1] = replace(copies[1], planes=~copies[1].planes)
    with pytest.raises(ValueError, match="2 bits are not a prefix of 4"):
        NestedMatrix.of(copies)


@pytest.mark.parametrize("isa", ISAS)
def test_four_bits_of_one_width_give_what_nested_ones_give(isa: str) -> None:
    """Alone they are one component, nested two."""
    rng = np.random.default_rng(12)
    nested = nested_replicas(rng, 256, 96)[4]
    alone = QuantizedExpert(4, replace(nested.w13), replace(nested.w2))
    kernel = NativeKernel(isa=isa, threads=1)
    prepared = [kernel.prepare(expert) for expert in (nested, alone)]
    assert [len(expert.components) for expert in prepared] == [4, 2]
    for tokens in (1, 3, 17):
        x, pairs = rng.standard_normal((tokens, 256)).astype(np.float32), random_pairs(rng, tokens, 1, 1)
        np.testing.assert_array_equal(*(kernel.execute(x, [expert], *pairs) for expert in prepared))
