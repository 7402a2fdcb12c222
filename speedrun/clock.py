"""The clock of the speedrun: it counts the FLOPs of every matrix product that a process computes, in any model.

    with Clock() as clock:
        ...                      forwards, backwards, vLLM's engine, whatever the code calls
    clock.flops

torch hands every operation to the clock before it runs, so nobody has to report anything. There is one formula: a
product with m x n results that adds up k terms for each costs 2 m n k. Attention of q queries over k keys is two
products per head. Its backward is four if it is written out, as in our trainer up to 512 keys, and five in torch's
fused kernel, which computes the scores again. A causal mask saves nothing. Nothing else costs anything. What is
computed counts: a recomputed activation once more, and padding like any token. What is shared (a prompt in the prefix
cache) counts once.

The clock stops the run at a product for which it has no formula, or of other numbers than float32. It would otherwise
be a way around the clock. It raises before the product is computed: an entry that catches the error has nothing.
"""

import functools
import re
import threading

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Name of an operation -> the place of its left factor among the arguments.
PRODUCTS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::mv": 0,
    "aten::addmv": 1,
    "aten::dot": 0,
    "aten::linear": 0,
    "aten::matmul": 0,
    "_C::onednn_mm": 1,  # vLLM's on a CPU; its result is its first argument
}
OUTER = "aten::addr"  # adds the products of two vectors to a matrix
# Name of an operation of fused attention -> (its products per head, the place of the queries; the keys follow).
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (2, 0),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (5, 1),
}
PAGED_ATTENTION = "_C::cpu_attention_with_kv_cache"  # vLLM's
# Free, whatever their names say. Of vLLM's operations only these are: few of its names tell what it computes.
FREE = {
    "aten::linalg_vector_norm",
    *("_C::create_onednn_mm_handler", "_C::release_dnnl_matmul_handler", "_C::is_onednn_acl_supported"),
    *("_C::cpu_attn_reshape_and_cache", "_C::cpu_attn_has_isa", "_C::compute_slot_mapping_kernel_impl"),
    *("_C::get_scheduler_metadata", "_C::init_cpu_memory_env", "_C::greedy_argmax", "_C::fused_gumbel_argmax"),
    *("_C::rms_norm", "_C::fused_add_rms_norm", "_C::rotary_embedding", "_C::silu_and_mul", "_C::gelu_and_mul"),
    *("_C::gelu_tanh_and_mul", "_C::gelu_new", "_C::gelu_fast", "_C::gelu_quick", "_C::gelu_tanh"),
}
# Operations of torch with these names may hide a product. The others are free.
MAY_MULTIPLY = re.compile(
    r"(mm|gemm|mv|dot|matmul|linear|attention|moe)($|_)|conv(?!ert)|rnn|lstm|gru|fft|linalg|einsum|kron|embedding_bag"
    r"|[cp]dist|euclidean_dist|transformer|experts|gated_delta|mamba|selective_scan|matrix_exp"
    r"|grid_sampler|affine_grid"  # the gradient of a grid adds up products over the channels
    r"|(^|_)solve|cholesky|ormqr|orgqr|geqrf"  # solving [[1, -A], [0, 1]] X = [[0], [B]] gives A B
)
NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp")


class NoFormula(Exception):
    """The clock does not know what an operation costs."""


class Clock(TorchDispatchMode):
    """While a block with it lasts, torch calls __torch_dispatch__ in place of each operation of this thread.

    Several threads may be in a block of the same clock.
    """

    def __init__(self):
        super().__init__()
        self.flops = 0  # since it was made, over all blocks
        # Operation -> (place of a factor among the arguments, its cost(arguments, result)), or None if it is free.
        self.costs: dict = {}
        self.adding = threading.Lock()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for kind in types:  # classes of arguments that are subclasses of Tensor
            computes = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
            if computes and kind is not DTensor:
                raise NoFormula(f"the clock does not see what {kind.__name__}.__torch_dispatch__ computes")
        if function.namespace == "vllm":
            # Python code of vLLM: what it calls is to be counted. torch turns the clock off inside of this method.
            with self:
                return function._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        if is_composite(function):
            # In inference mode torch hands it over whole. Only the operations that it calls have costs.
            with self:
                return function.decompose(*args, **kwargs)
        if function not in self.costs:
            self.costs[function] = cost_of(function.namespace, function._schema.name)
        if self.costs[function] is None:
            return function(*args, **kwargs)
        factor, cost = self.costs[function]
        check_arguments(args, kwargs, factor)
        result = function(*args, **kwargs)
        # What this process computes: the shape of the whole tensor is only what somebody has said.
        flops = cost([local(value) for value in args], local(result))
        with self.adding:
            self.flops += flops
        return result


def local(value):
    """The part of a DTensor that this process has. Anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


@functools.cache
def is_composite(function) -> bool:
    """Whether an operation of torch is only calls of others. Those of PRODUCTS have a formula as a whole.

    vLLM registers operations in the same way that compute themselves, such as its attention.
    """
    has_formula = function._schema.name.removesuffix("_") in PRODUCTS
    return function.namespace == "aten" and not has_formula and function._can_decompose()


def cost_of(namespace: str, name: str):
    """(Place of a factor among an operation's arguments, function that computes its FLOPs from its arguments and its
    result). None if it is free. Raises NoFormula.
    """
    name = name.removesuffix("_")  # addmm_ adds in place
    if name in PRODUCTS:
        return PRODUCTS[name], functools.partial(product, PRODUCTS[name])
    if name == OUTER:
        return 1, outer_product
    if name in ATTENTION:
        products, queries = ATTENTION[name]
        return queries, functools.partial(attention, products, queries)
    if name == PAGED_ATTENTION:
        return 0, paged_attention
    if name in FREE or (namespace in NAMESPACES and not MAY_MULTIPLY.search(name.partition("::")[2])):
        return None
    raise NoFormula(f"the clock has no formula for {name}; use other operations, or propose a formula for clock.py")


def check_arguments(args, kwargs, factor: int) -> None:
    """Refuse arguments whose cost would not be what it seems. Raises NoFormula. factor: the place of one of them."""
    # A wider number can hold two float32, so one product would do the work of two.
    if args[factor].dtype != torch.float32:
        raise NoFormula(f"a product in {args[factor].dtype}: the speedrun computes in float32; call .float() on both")
    # torch gives `out` the shape of the result, and the factor's own shape would be lost.
    out = kwargs.get("out")
    if out is not None and any(out is argument for argument in args):
        raise NoFormula("a product that writes its result into one of its factors; take another `out`")


def product(left: int, args, result) -> int:
    """2 m n k. The result has m n numbers, and the left factor, args[left], has rows of k."""
    if result is None:  # vLLM writes it into the first argument
        result = args[0]
    return 2 * result.numel() * args[left].shape[-1]


def outer_product(_, result) -> int:
    """A product with k = 1: each number of the result has one term."""
    return 2 * result.numel()


def attention(products: int, place: int, args, _) -> int:
    """That many products per head. args[place]: queries (..., heads, q, width), and the keys (..., k, width) follow."""
    queries, keys = args[place : place + 2]
    return 2 * products * queries.numel() * keys.shape[-2]


def paged_attention(args, _) -> int:
    """Two products per head, of many sequences at once.

    args: [0] queries (tokens, heads, width); [4] where the queries of each sequence begin, and the end; [5] how many
    keys each has.
    """
    query, starts, keys = args[0], args[4], args[5]
    sequences = len(starts) - 1
    pairs = int((starts.diff() * keys[:sequences]).sum())  # of a query and a key
    heads_times_width = query[0].numel()
    return 4 * pairs * heads_times_width
