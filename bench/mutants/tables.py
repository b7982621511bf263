"""Which tests answer for which file, fast ones first; and the changes that no test can notice, each with its reason.

A test file may be narrowed to the tests that need no ranks: a mutant is tried by many short runs.
"""

from __future__ import annotations

ADVERSARIES = "tests/parallel/test_schedules.py::test_preset_under_the_adversaries"
SCHEDULES = (
    ADVERSARIES,
    "tests/parallel/test_schedules.py::test_heads_that_do_not_divide",
    "tests/parallel/test_schedules.py::test_no_tokens_at_all",
    "tests/parallel/test_schedules.py::test_one_ranks_row_is_the_same_as_in_the_whole_plan",
    "tests/parallel/test_schedules.py::test_random_schedules_equal_dense_attention[0]",
)
EXECUTED = (
    *SCHEDULES[:-1],
    "tests/parallel/test_schedules.py::test_gradients_do_not_drift_with_ranks",
    "tests/parallel/test_schedules.py::test_softmax_scale_reaches_every_round",
    "tests/parallel/test_schedules.py::test_useless_hops_send_nothing",
    "tests/parallel/test_schedules.py::test_memory_of_a_ring_does_not_depend_on_the_documents",
    "tests/parallel/test_schedules.py::test_documents_do_not_leak",
    SCHEDULES[-1],
)
PROOF = (
    "tests/parallel/proof/test_broken_plans.py",
    "tests/parallel/proof/test_verify.py",
    "tests/parallel/proof/test_coverage.py",
    "tests/parallel/proof/test_soundness.py::test_what_is_accepted_is_right[0]",
    SCHEDULES[-1],
)
PLAN = "tests/parallel/plan/"

# file or folder -> what pytest is given, in this order; the longest name that fits a file counts
TESTS: dict[str, tuple[str, ...]] = {
    "parallel/proof/": PROOF,
    "parallel/plan/codec.py": (f"{PLAN}test_codec.py", "tests/kernels/codec/test_codec.py"),
    "parallel/plan/ir.py": (
        f"{PLAN}test_ir.py", "tests/parallel/proof/test_verify.py", "tests/parallel/proof/test_broken_plans.py",
        *SCHEDULES,
    ),
    "parallel/plan/layout.py": (f"{PLAN}test_layout.py", "tests/data/test_loader.py", ADVERSARIES),
    "parallel/plan/mesh.py": (f"{PLAN}test_mesh.py", "tests/parallel/price/test_cluster.py", ADVERSARIES),
    "parallel/plan/placement.py": (f"{PLAN}test_placement.py", f"{PLAN}test_mesh.py", *SCHEDULES),
    "parallel/plan/plan.py": (
        f"{PLAN}test_plan.py", "tests/parallel/proof/test_verify.py", *EXECUTED[:-1],
        "tests/parallel/test_schedules.py::test_hash_changes_with_everything_it_should",
        "tests/parallel/test_schedules.py::test_work_is_balanced_where_it_should_be", SCHEDULES[-1],
    ),
    "parallel/plan/serial.py": (
        f"{PLAN}test_serial.py", "tests/parallel/proof/test_verify.py",
        "tests/parallel/test_schedules.py::test_json_round_trip_runs_the_same",
    ),
    "parallel/plan/tokens.py": (f"{PLAN}test_tokens.py", f"{PLAN}test_visibility.py", *PROOF[:2], *SCHEDULES),
    "parallel/plan/visibility.py": (
        f"{PLAN}test_visibility.py", f"{PLAN}test_tokens.py", f"{PLAN}test_layout.py", *PROOF[:2], *SCHEDULES,
    ),
    "parallel/plan/writer.py": (f"{PLAN}test_writer.py", "tests/parallel/proof/test_verify.py", *SCHEDULES),
    "parallel/runtime/executor.py": ("tests/parallel/runtime/test_executor.py", *EXECUTED),
    "parallel/runtime/bind.py": ("tests/parallel/runtime/test_bind.py", *EXECUTED),
    "kernels/merge/merge.py": ("tests/kernels/merge/test_merge.py", "tests/parallel/runtime/test_executor.py"),
    "kernels/codec/torch_codec.py": ("tests/kernels/codec/test_codec.py", "tests/kernels/codec/test_bits.py"),
    "models/loss.py": ("tests/models/test_loss.py",),
    "data/loader.py": ("tests/data/test_loader.py", "tests/data/sources/test_mixture.py"),
    "data/packing.py": ("tests/data/test_packing.py", "tests/data/test_loader.py"),
    "data/batch.py": ("tests/data/test_loader.py", "tests/data/sources/test_mixture.py"),
    "training/record/checkpoint.py": ("tests/training/record/test_checkpoint.py",),
}  # fmt: skip

SHORTCUT = "a shortcut: the long way comes to the same"
ONE_DIM = "a tensor of one dim: its first size is its last"

# (file, its line, operator, the line as it becomes) -> why nothing can notice
EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    (
        "kernels/merge/merge.py", "out = torch.zeros(outs[0].shape, dtype=high, device=outs[0].device)", "number",
        "out = torch.zeros(outs[0].shape, dtype=high, device=outs[-1].device)",
    ): "partials lie on one device, or the sum fails as it did",
    (
        "kernels/merge/merge.py",
        "outs, lses = partials[: len(partials) // 2], partials[len(partials) // 2 :]", "arithmetic",
        "outs, lses = partials[: (len(partials) * 2)], partials[len(partials) // 2 :]",
    ): "what stands behind the outs is never reached: zip ends with the lses",
    (
        "models/loss.py", "for start in range(0, valid.shape[0], chunk):", "number",
        "for start in range(0, valid.shape[-1], chunk):",
    ): ONE_DIM,
    ("parallel/plan/tokens.py", "if not keep.all():", "condition", "if True:"): SHORTCUT,
    (
        "parallel/plan/tokens.py",
        'low = np.searchsorted(spans[:, 1], start, side="right")  # first span that ends after the range\'s start',
        "call",
        "low = np.searchsorted(spans[:, 1], start, side='left')  # first span that ends after the range's start",
    ): "a span that ends where a range starts gives an empty piece, which from_array leaves out",
    (
        "parallel/plan/tokens.py", "if (ranges[1:, 0] >= ranges[:-1, 1]).all():", "compare",
        "if ((ranges[1:, 0] > ranges[:-1, 1])).all():",
    ): SHORTCUT,
    (
        "parallel/plan/tokens.py", "held[start + 1 : stop + 1 : stride] = 1", "number",
        "held[start + 1 : stop + 1 : stride] = 2",
    ): "a mark that is any number but 0",
    (
        "parallel/plan/visibility.py",
        "first = start + np.maximum(spans[at, 0] - start + stride - 1, 0) // stride * stride", "number",
        "first = start + np.maximum(spans[at, -1] - start + stride - 1, 0) // stride * stride",
    ): "a hit that is not sure is asked again, exactly",
    (
        "parallel/plan/visibility.py",
        "first = start + np.maximum(spans[at, 0] - start + stride - 1, 0) // stride * stride", "number",
        "first = start + np.maximum(spans[at, 0] - start + stride - 1, -1) // stride * stride",
    ): "where it is below 0 the range's start lies in the span, and so does what comes out",
    (
        "parallel/plan/visibility.py",
        "first = start + np.maximum(spans[at, 0] - start + stride - 1, 0) // stride * stride", "arithmetic",
        "first = start + (np.maximum(spans[at, 0] - start + stride - 1, 0) * stride) * stride",
    ): "a hit that is not sure is asked again, exactly",
    ("parallel/plan/visibility.py", "if aligned.all():", "condition", "if False:"): SHORTCUT,
    ("parallel/plan/visibility.py", "if not self.mask.plain:", "condition", "if True:"): SHORTCUT,
    (
        "parallel/proof/coverage.py", "ranges = cut.clip(join_spans(by.ranges[:, :2])).ranges", "slice",
        "ranges = cut.clip(join_spans(by.ranges[:, :])).ranges",
    ): "a third column that nobody reads",
    (
        "parallel/proof/coverage.py",
        "if any(h[0] <= heads[0] and heads[1] <= h[1] and inside(tokens, p) for p, h in parts):", "number",
        "if any(h[0] <= heads[0] and heads[1] <= h[0] and inside(tokens, p) for p, h in parts):",
    ): SHORTCUT,
    ("parallel/proof/coverage.py", "if tokens == held:", "condition", "if False:"): SHORTCUT,
    ("parallel/proof/coverage.py", "continue", "statement", "pass"): "a head that is checked twice is as right",
    (
        "parallel/proof/coverage.py", "checked.add(same)", "statement", "pass",
    ): "a head that is checked twice is as right",
    (
        "parallel/proof/contributions.py",
        "missing = self._missing(ranks[0], source[0], tokens, heads, blocks) if len(ranks) == 1 else None", "number",
        "missing = self._missing(ranks[-1], source[0], tokens, heads, blocks) if len(ranks) == 1 else None",
    ): "a list of one",
    (
        "parallel/runtime/executor.py", "heads = slice(first - into_kv.heads[0], stop - into_kv.heads[0])", "number",
        "heads = slice(first - into_kv.heads[-1], stop - into_kv.heads[0])",
    ): "the same head, counted from the end",
    (
        "training/record/checkpoint.py",
        '_write_text(temporary / "state.json", json.dumps({"step": step, **state}, indent=1))', "number",
        '_write_text(temporary / "state.json", json.dumps({"step": step, **state}, indent=2))',
    ): "spaces in a file that people may read",
}  # fmt: skip


def answering(path: str) -> tuple[str, ...]:
    """What pytest is given for a file. KeyError for one that has no tests here."""
    names = [name for name in TESTS if path == name or (name.endswith("/") and path.startswith(name))]
    return TESTS[max(names, key=len)]
