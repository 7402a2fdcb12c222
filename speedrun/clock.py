"""The clock of the speedrun: it counts the FLOPs of every matrix product that a process computes, in any model.

    with Clock() as clock:
        ...                      forwards, backwards, vLLM's engine, whatever the code calls
    clock.flops

torch hands every operation to the clock before it runs, so nobody has to report anything. There is one formula: a
product with m x n results that adds up k terms for each costs 2 m n k. Attention of q queries over k keys is two
products per head, its backward five; a causal mask saves nothing. Nothing else costs anything. What is computed twice
(a recomputed activation, padding) counts twice, and what is shared (a prompt in the prefix cache) counts once.

The clock stops the run at a product for which it has no formula, or of other numbers than float32. It would otherwise
be a way around the clock.
"""

import functools
import re

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
# Name of an operation of fused attention -> (its products per head, the place of the queries; the keys follow).
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (2, 0),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (5, 1),
}
PAGED_ATTENTION = "_C::cpu_attention_with_kv_cache"  # vLLM's
FREE = {"aten::linalg_vector_norm", "_C::create_onednn_mm_handler", "_C::release_dnnl_matmul_handler"}
# Operations of these names may hide a product.
MAY_MULTIPLY = re.compile(
    r"(mm|gemm|mv|dot|matmul|linear|attention|moe)($|_)|conv(?!ert)|rnn|lstm|gru|fft|linalg|einsum|kron|embedding_bag"
    r"|[cp]dist|euclidean_dist|transformer|experts|gated_delta|mamba|selective_scan|matrix_exp"
    r"|mla_|paged_mqa|o_proj|delta_rule|state_update"
    r"|(^|_)solve|cholesky|ormqr|orgqr|geqrf"  # solving [[1, -A], [0, 1]] X = [[0], [B]] gives A B
)
NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "_C")


class NoFormula(Exception):
    """The clock does not know what an operation costs."""


class Clock(TorchDispatchMode):
    """While a block with it lasts, torch calls __torch_dispatch__ in place of each operation of this thread."""

    def __init__(self):
        super().__init__()
        self.flops = 0  # since it was made, over all blocks
        self.costs: dict = {}  # operation -> its cost(arguments, result), or None if it is free

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
        result = function(*args, **kwargs)
        cost = self.costs[function]
        if cost is not None:
            # What this process computes: the shape of the whole tensor is only what somebody has said.
            self.flops += cost([local(value) for value in args], local(result))
        return result


class ClockOfThread(Clock):
    """The clock of any other thread, for which the entry's clock is off: a product stops what the thread does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if self.flops:
            raise NoFormula("a product in a thread: the clock counts the main thread alone")
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
    """The function that computes an operation's FLOPs from its arguments and its result. Raises NoFormula."""
    name = name.removesuffix("_")  # addmm_ adds in place
    if name in PRODUCTS:
        return functools.partial(product, PRODUCTS[name])
    if name in ATTENTION:
        return functools.partial(attention, *ATTENTION[name])
    if name == PAGED_ATTENTION:
        return paged_attention
    if name in FREE or (namespace in NAMESPACES and not MAY_MULTIPLY.search(name.partition("::")[2])):
        return None
    raise NoFormula(f"the clock has no formula for {name}; use another operation, or add one to speedrun/clock.py")


def check_dtype(factor: torch.Tensor) -> None:
    """A wider number can hold two float32, so one product would do the work of two. Raises NoFormula."""
    if factor.dtype != torch.float32:
        raise NoFormula(f"a product in {factor.dtype}: the speedrun computes in float32")


def product(left: int, args, result) -> int:
    """2 m n k. The result has m n numbers, and the left factor, args[left], has rows of k."""
    if result is None:  # vLLM writes it into the first argument
        result = args[0]
    check_dtype(args[left])
    return 2 * result.numel() * args[left].shape[-1]


def attention(products: int, place: int, args, _) -> int:
    """That many products per head. args[place]: queries (..., heads, q, width), and the keys (..., k, width) follow."""
    queries, keys = args[place : place + 2]
    check_dtype(queries)
    return 2 * products * queries.numel() * keys.shape[-2]


def paged_attention(args, _) -> int:
    """Two products per head, of many sequences at once.

    args: [0] queries (tokens, heads, width); [4] where the queries of each sequence begin, and the end; [5] how many
    keys each has.
    """
    query, starts, keys = args[0], args[4], args[5]
    check_dtype(query)
    sequences = len(starts) - 1
    pairs = int((starts.diff() * keys[:sequences]).sum())  # of a query and a key
    heads_times_width = query[0].numel()
    return 4 * pairs * heads_times_width
