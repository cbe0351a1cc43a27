"""The Llama 3 network and the facts its spec states."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchtitan.models import MODELS
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.layers import RopeScaling
from torchtitan.models.spec import count_parameters, initialize

SPEC = MODELS["llama3"]
SIZES = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 61}
ARGS = DecoderArgs(**SIZES, rope_scaling=RopeScaling(factor=8.0, original_context=16))
TIED = replace(ARGS, tied=True)
SEQ_LEN = 48


def build(args=ARGS, seq_len=SEQ_LEN):
    model = SPEC.build(args, seq_len)
    initialize(model.named_parameters(), lambda _: 0.2, seed=0)
    return model


def tokens(seq_len=SEQ_LEN):
    return torch.randint(ARGS.vocab_size, (2, seq_len), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("flavor", "total", "embedding"),
    [
        # V*D + D + layers * (2*D*H*E + 2*D*K*E + 3*D*F + 2*D) + V*D unless tied
        ("debugmodel", 5_770_496, 2048 * 256),
        ("1B", 1_235_814_400, 128_256 * 2048),
        ("3B", 3_212_749_824, 128_256 * 3072),
        ("8B", 8_030_261_248, 128_256 * 4096),
        ("70B", 70_553_706_496, 128_256 * 8192),
        ("405B", 405_853_388_800, 128_256 * 16384),
    ],
)
def test_parameter_counts(flavor, total, embedding):
    with torch.device("meta"):
        model = SPEC.build(SPEC.flavors[flavor], 16)
    assert count_parameters(model) == (total, embedding)


@pytest.mark.parametrize(
    ("flavor", "seq_len", "flops"),
    [
        # 6 * (8,030,261,248 - 525,336,576) + 12 * 32 layers * 32 heads * 128 * 8192
        ("8B", 8192, 45_029_548_032 + 12_884_901_888),
        ("405B", 8192, 6 * 403_752_042_496 + 12 * 126 * 128 * 128 * 8192),
        # Tied: the matrix that embeds is also the one that gives the logits, so all weights count.
        ("1B", 4096, 6 * 1_235_814_400 + 12 * 16 * 32 * 64 * 4096),
    ],
)
def test_flops_per_unit(flavor, seq_len, flops):
    assert SPEC.flops_per_unit(SPEC.flavors[flavor], seq_len) == flops


@pytest.mark.parametrize("args", [ARGS, TIED], ids=["untied", "tied"])
def test_parameter_names_are_those_of_metas_checkpoints(args):
    layer = ["attention_norm", *(f"attention.w{x}" for x in "qkvo"), "ffn_norm"]
    layer += [f"feed_forward.w{number}" for number in (1, 2, 3)]
    names = ["tok_embeddings.weight"]
    names += [f"layers.{i}.{name}.weight" for i in range(3) for name in layer]
    names += ["norm.weight"] + ([] if args.tied else ["output.weight"])
    model = build(args)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == names


def test_initial_weights_by_name():
    args = SPEC.flavors["8B"]
    assert SPEC.init_std(args, "layers.3.attention_norm.weight") == "ones"
    assert SPEC.init_std(args, "norm.weight") == "ones"
    assert SPEC.init_std(args, "tok_embeddings.weight") == 0.02
    assert SPEC.init_std(args, "layers.3.attention.wq.weight") == 0.02
    for residual in ("layers.3.attention.wo.weight", "layers.3.feed_forward.w2.weight"):
        assert SPEC.init_std(args, residual) == pytest.approx(0.02 / 8)  # sqrt(2 * 32 layers)


def test_built_on_meta_equals_built_on_the_device():
    with torch.device("meta"):
        model = SPEC.build(ARGS, SEQ_LEN)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(torch.nan)
    model.init_buffers()
    initialize(model.named_parameters(), lambda _: 0.2, seed=0)
    assert torch.equal(model(tokens()), build()(tokens()))


def test_no_token_sees_a_later_one():
    model, inputs = build(), tokens()
    changed = inputs.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % ARGS.vocab_size
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.isclose(before[:, 20:], after[:, 20:]).all(dim=-1).any()


def test_positions_say_where_a_token_stands():
    """Any order of the tokens is the same sequence to the rotation, which only reads positions."""
    rope, order = build().rope, torch.randperm(SEQ_LEN, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, SEQ_LEN, 2, 8, generator=torch.Generator().manual_seed(0))
    straight = rope(x, torch.arange(SEQ_LEN)[None])
    assert torch.equal(rope(x[:, order], order[None]), straight[:, order])


def test_documents_packed_together_do_not_see_each_other():
    """Each document of a packed sequence gives the logits it would give alone."""
    model, inputs = build(), tokens()
    documents = torch.zeros_like(inputs)
    documents[:, 12:] = 1
    packed = model(inputs, documents=documents)
    torch.testing.assert_close(packed[:, :12], model(inputs[:, :12]))
    torch.testing.assert_close(packed[:, 12:], model(inputs[:, 12:]))
    assert not torch.isclose(packed[:, 13:], model(inputs)[:, 13:]).all(dim=-1).any()


def test_a_shorter_sequence_needs_no_other_table():
    torch.testing.assert_close(build()(tokens())[:, :20], build()(tokens()[:, :20]))
    assert build().rope.table.shape == (SEQ_LEN, 4, 2)


def test_rotation_depends_on_the_distance_alone():
    """The defining property: a query meets a key the same way wherever the two stand."""
    rope = build().rope
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    places = torch.arange(SEQ_LEN)[None]
    rotated_q, rotated_k = (rope(v.expand(1, SEQ_LEN, 1, 8), places)[0, :, 0] for v in (q, k))
    scores = rotated_q @ rotated_k.T
    for distance in range(SEQ_LEN):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal))
    assert torch.equal(rotated_q[0], q)


def test_rotation_is_exact_in_bf16():
    """Cast to bf16, a model keeps its fp32 table once `init_buffers` ran, and rotates in fp32."""
    model = build(seq_len=4096)
    rope, table = model.rope, model.rope.table
    model.to(torch.bfloat16).init_buffers()
    assert rope.table.dtype == torch.float32
    assert torch.equal(rope.table, table)
    x = torch.randn(1, 4096, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    half, full = x.clone().requires_grad_(), x.float().requires_grad_()
    positions = torch.arange(4096)[None]
    assert torch.equal(rope(half, positions), rope(full, positions).bfloat16())
    rope(half, positions).backward(x), rope(full, positions).backward(x.float())
    assert torch.equal(half.grad, full.grad.bfloat16())
    assert model(tokens()).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_norms_are_computed_in_float32(family):
    """In bfloat16, only their result is rounded: every norm of a block, the last and of heads."""
    args = replace(ARGS, head_norms=family == "qwen3")
    model = MODELS[family].build(args, SEQ_LEN)
    initialize(model.named_parameters(), lambda _: 1.0, seed=0)
    norms = {name: part for name, part in model.bfloat16().named_modules() if "norm" in name}
    assert len(norms) == (13 if args.head_norms else 7)
    generator = torch.Generator().manual_seed(1)
    for name, norm in norms.items():
        x = torch.randn(64, len(norm.weight), generator=generator).bfloat16()
        wide = x.float()
        exact = wide * (wide.square().mean(-1, keepdim=True) + args.norm_eps).rsqrt()
        expected = exact * norm.weight.float()
        torch.testing.assert_close(norm(x).float(), expected, rtol=2**-8, atol=0, msg=name)


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("args", [ARGS, TIED], ids=["untied", "tied"])
def test_fsdp_mixed_precision_computes_what_bf16_does(one_rank, args):
    """Above all the table: were it an argument of the blocks, FSDP would cast it to bf16."""
    plain = build(args).to(torch.bfloat16)
    plain.init_buffers()

    sharded = build(args)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in SPEC.blocks(sharded).values():
        fully_shard(block, mesh=one_rank, mp_policy=policy)
    fully_shard(sharded, mesh=one_rank, mp_policy=policy)

    logits = sharded(tokens())
    assert torch.equal(logits, plain(tokens()))
    logits.float().logsumexp(-1).mean().backward()
    assert all(parameter.grad is not None for parameter in sharded.parameters())
