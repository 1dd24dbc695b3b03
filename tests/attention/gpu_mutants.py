"""Faults planted in the GPU kernels, each with a batch that must show it: a wrong result, NaN, or a race."""

from __future__ import annotations

from pallas_kernels.gpu import attention, eighths, fetching, flash, items, products, spans, sums
from tests.attention.kernel_mutants import Mutant

MUTANTS = [
    Mutant(
        "values are not waited for",
        fetching.Moves,
        "wait_for_values",
        'plgpu.barrier_wait(self._smem["v_there"].at[slot])',
        "pass",
    ),
    Mutant(
        "queries are not waited for",
        fetching.Moves,
        "begin",
        'plgpu.barrier_wait(self._smem["q_there"])',
        "pass",
    ),
    Mutant(
        "without TMA, a chunk too few is waited for",
        fetching.Moves,
        "turn",
        "* (stages - 2)",
        "* (stages - 1)",
        "waits",
    ),
    Mutant(
        "without TMA, the last chunks are not waited for",
        fetching.Moves,
        "turn",
        "plgpu.wait_gmem_to_smem(0))  # the last",
        "plgpu.wait_gmem_to_smem(on_their_way))  # the last",
        "waits",
    ),
    Mutant(
        "without TMA, a slot is filled before the wait",
        fetching.Moves,
        "turn",
        "    on_their_way =",
        "    self.fetch(further)\n    on_their_way =",
        "waits",
    ),
    Mutant(
        "the first keys are not waited for",
        fetching.Moves,
        "turn",
        'plgpu.barrier_wait(self._smem["k_there"].at[slot])',
        "pass",
    ),
    Mutant(
        "reads are not done when a slot is filled again", fetching.Moves, "turn", "plgpu.commit_smem()", "pass", "long"
    ),
    Mutant(
        "a block behind the last is fetched",
        fetching.Moves,
        "fetch",
        "self._span.limit - 1",
        "self._span.limit + 99",
        "bounds",
    ),
    Mutant(
        "the last page is clamped too early", fetching.Moves, "fetch", "self._span.limit - 1", "self._span.limit - 17"
    ),
    Mutant(
        "the page of the chunk's first token serves all", fetching.Moves, "fetch", "chunk + k * self._at_once", "chunk"
    ),
    Mutant(
        "the chunk at hand is fetched again",
        fetching.Moves,
        "turn",
        "self.fetch(further))\n        plgpu",
        "self.fetch(further - 1))\n        plgpu",
        "long",
    ),
    Mutant("values are keys", fetching.Moves, "fetch", "(block * 2 + which)", "(block * 2 + 0 * which)"),
    Mutant("another layer is read", fetching.Moves, "__init__", "layer * (", "0 * ("),
    Mutant("another head is read", fetching.Moves, "fetch", "form.num_kv_heads + self._head", "form.num_kv_heads"),
    Mutant("values behind the last token stay", flash._Tile, "_owned", "& (token < self.span.limit)", "& (token >= 0)"),
    Mutant(
        "values before the window stay", flash._Tile, "_owned", "(token >= self.span.oldest)", "(token >= 0)", "before"
    ),
    Mutant(
        "values that nobody owns are weighted",
        products.ByWarp,
        "added",
        "owned(v.shape, self.layouts.right)",
        "owned(v.shape, self.layouts.right) | (v != v)",
    ),
    Mutant(
        "wgmma weights values that nobody owns",
        products.ByWarpgroup,
        "added",
        "owned(v.shape, plgpu.Layout.WGMMA)",
        "owned(v.shape, plgpu.Layout.WGMMA) | (v != v)",
        "together",
    ),
    Mutant("no chunk is masked", flash._Tile, "chunk", "self.span.end - self.span.count + 1", "self.span.end + 999"),
    Mutant(
        "the chunk at the window's edge is not masked",
        flash._Tile,
        "chunk",
        "start < self.span.end - self.inputs.window_1[0]",
        "start < 0",
        "window",
    ),
    Mutant("a token too many is seen", flash._Tile, "_seen", "token <= last", "token <= last + 1", "few"),
    Mutant("the window is one wider", flash._Tile, "_seen", "token > last -", "token >= last -", "window"),
    Mutant("trees are ignored", flash._Tile, "_seen", "where(own < 0,", "where(own < 99,", "trees"),
    Mutant(
        "a tree's chunk is not masked", flash._Tile, "chunk", "self.span.start if self.form.tree else", "", "a tree"
    ),
    Mutant(
        "windows hide what trees show",
        flash._Tile,
        "_seen",
        "seen & (token <",
        "seen & (token > last - 2) & (token <",
        "trees",
    ),
    Mutant("a tree ends with its item", spans, "_told", "start), length", "start), limit", "trees"),
    Mutant("a window cuts a tree", spans, "_told", "jnp.minimum(oldest, start), length", "oldest, length", "trees"),
    Mutant("old sums do not fade", flash._Tile, "_fold", "acc = acc * across(fade, acc)", "pass", "long"),
    Mutant("old weights do not fade", flash._Tile, "_fold", "mass * fade +", "mass +", "long"),
    Mutant(
        "the cap is not multiplied back",
        flash._Tile,
        "_fold",
        "_tanh(scores) * self.inputs.scales[2 * form.num_kv_heads]",
        "_tanh(scores)",
        "cap",
    ),
    Mutant("the series of tanh serves all", flash, "_tanh", "square < 0.01", "square < 9.0", "cap"),
    Mutant("no series serves tanh near 0", flash, "_tanh", "square < 0.01", "square < 0.0", "a large cap"),
    Mutant("splits without tokens make a result", attention, "combine", "used > 0", "used > -1", "large values"),
    Mutant("infinite sinks are infinite", attention, "_attend", ", _MOST_SINK)", ", jnp.inf)", "an infinite sink"),
    Mutant("splits overlap", spans, "of", "first + split * each", "first + split * (each - 1)", "long"),
    Mutant("the last split with tokens is left out", spans, "splits", "chunks + (each", "chunks - (each", "long"),
    Mutant("splits without tokens are read", spans, "splits", "return lax.div(", "return 3 + 0 * lax.div(", "short"),
    Mutant(
        "without TMA, chunks are fetched before queries",
        fetching.Moves,
        "begin",
        "_cp_async(queries, here)",
        "self.fetch(0); _cp_async(queries, here)",
        "waits",
    ),
    Mutant(
        "the window begins a chunk late",
        spans,
        "_told",
        "first = lax.div(oldest, jnp.int32(chunk))",
        "first = lax.div(oldest, jnp.int32(chunk)) + 1",
        "window",
    ),
    Mutant("sinks have no weight", sums.Sums, "result", "+ jnp.exp2(sink_P - most_P)", "", "sinks"),
    Mutant("a split's rows are its neighbour's", sums, "first_row", "* splits + split", "* splits + split * 0", "long"),
    Mutant("parts are not weighted", attention, "combine", "part * across(weight, part)", "part", "long"),
    Mutant(
        "splits behind the first eight are left out",
        attention,
        "combine",
        "rounds * _AT_ONCE, used",
        "used, used",
        "long",
    ),
    Mutant(
        "a query's results are the next one's",
        items,
        "by_token",
        "items.place_T[:, None] * group",
        "items.place_T[:, None]",
        "few",
    ),
    Mutant("a tile too few", items, "most_tiles", "+ min(num_rows, num_tokens)", "", "mixed"),
    Mutant("tiles see a token too few", items, "tiles", "+ before_X + count_X,", "+ before_X + count_X - 1,", "mixed"),
    Mutant(
        "rows that contradict themselves are served", attention, "prepare", "(kv_lens_R >= q_lens_R) &", "", "unsound"
    ),
    Mutant("eight bits keep a wrong exponent", eighths, "converted", "* 256.0", "* 128.0", "eighths"),
]
