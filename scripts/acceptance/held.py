"""Criteria that tests hold, and which."""

from __future__ import annotations

from acceptance.registry import held

held(2, "make test: the whole suite, nightly tests included", "")
held(2, "kvdsl check imports neither torch nor transformers", "test_imports.py::test_the_compiler_imports_nothing_heavy")
held(2, "a C++ build says so, once", "build/test_cxx.py::test_builds_once_and_says_so")
held(
    2,
    "mistakes: one clear message, an exit code, no traceback",
    "cli/test_errors.py",
    "eval/test_commands.py::test_mistakes",
)
held(
    2,
    "budget >= length: the logits are those of DynamicCache, every policy and model family",
    "hf/test_families.py::test_budget_that_holds_everything_is_the_dynamic_cache",
)
held(
    2,
    "differential tests against the interpreter: >= 300 cases for each backend, < 1 % near a boundary",
    "differential/test_random.py::test_random_traces",
    "differential/test_statements.py",
    "differential/test_dyadic.py",
)
held(
    2,
    "left-padded batches give each row what it gets alone",
    "hf/test_eviction.py::test_padded_row_gets_what_it_gets_alone",
    "hf/test_statements.py::test_padded_row_gets_what_it_gets_alone",
)
held(2, "tensor parallelism over two processes", "hf/test_tensor_parallel.py::test_two_processes_equal_one")
held(2, "nothing in a .kv file can inject code", "emit/test_injection.py")
held(
    2,
    "2,000 generated tokens at budget 256: no buffer moves, the resident set grows by less than 4 MiB",
    "hf/test_memory.py::test_two_thousand_tokens",
)
held(
    2,
    "the repository's exemplars are what the compiler makes (`kvdsl compile --check` in `make test`)",
    "emit/test_render.py",
)

held(
    3,
    "the weights' size, and that their digests are checked on load",
    "test_reference_model.py::test_the_shipped_files_match_their_digests_and_sizes",
    "test_reference_model.py::test_tampered_weights_are_refused",
)
held(3, "the recipe runs end to end at toy size", "test_training_recipe.py")

held(
    4,
    "every policy is shipped, checks without errors, is short and cites its source",
    "sema/test_policies.py::test_shipped_policies_are_clean_short_and_documented",
    "docs/test_tables.py::test_the_readme_shows_every_policy",
)
held(4, "every policy's *_test.kv passes", "scenarios/test_shipped.py")
held(4, "every policy against the paper's formula by brute force, on random logits", "interp/test_papers.py")
held(4, "illegal combinations are refused by check, each with a code", "sema/test_combinations.py")
held(4, "every diagnostic's example fails with it", "diagnostics/test_codes.py")
held(4, "the examples of README and docs, the tutorial's own policy on every backend", "docs/test_pages.py")
held(4, "300 random policies and more", "differential/test_policies.py")

held(5, "kernels of every policy against the reference interpreter, in Triton's interpreter", "triton/test_policies.py")
held(5, "bytes and launches of a step", "triton/test_steps.py")
held(
    5,
    "ahead of time, on five targets: no kernel spills",
    "triton/test_build.py::test_kernels_compile_for_every_target_and_spill_next_to_nothing",
    "triton/test_build.py::test_what_no_shipped_policy_has",
)
held(
    5,
    "a decode step is one graph (fullgraph) with the tokens, slots and columns of an eager one",
    "hf/test_compile.py::test_a_compiled_step_is_an_eager_one",
    "hf/test_compile.py::test_inductor",
)
held(
    5,
    "the operator's schema, shapes and functional form (torch.library.opcheck)",
    "hf/test_compile.py::test_the_operator_says_what_it_does",
)
held(
    5,
    "transformers' auto-compilation in `generate`: one graph for all steps and caches",
    "hf/test_compile.py::test_generate_compiles_by_itself",
)
held(
    5,
    "caches that grow are refused or served outside of the graph",
    "hf/test_compile.py::test_a_cache_that_grows_cannot_be_compiled_whole",
    "hf/test_compile.py::test_where_the_graph_may_break_a_cache_that_grows_is_served",
)

held(
    6,
    "slots in any order give what shift and append gives, with masks and windows, plain and rotated, per backend",
    "differential/test_compact.py::test_in_place_equals_shift_and_append",
)
held(
    6,
    "generate says what the model says with a shift-and-append cache, 500 steps, C++ and torch",
    "bench/test_shifting.py::test_in_place_says_what_shift_and_append_says_for_500_steps",
)
held(6, "models with ALiBi are refused with a reason", "hf/test_refusals.py::test_attention_that_cannot_be_reached")
held(
    6,
    "compact positions are the kept tokens by themselves at 0 to n - 1, in one-layer models of ten families and more",
    "hf/test_compact.py::test_logits_are_those_of_the_kept_tokens_alone",
)
held(
    6,
    "`rope` cached is fused, `storage` in blocks is in place: to the bit on torch and Triton, and in C++",
    "runtime/test_rope_cached.py",
    "runtime/test_blocks.py",
    "triton/test_blocks.py",
    "triton/test_rope_cached.py",
)
held(
    6,
    "steps that are taken back never happened, to the bit, per policy and backend",
    "runtime/test_undo.py::test_what_was_taken_back_never_happened",
)
held(
    6,
    "assisted decoding and prompt lookup say and keep what plain decoding does; cropping is exact or refused",
    "hf/test_speculation.py",
)
held(6, "E tokens evicted and E inserted in one update, alike on every backend", "runtime/test_replacing.py")
held(
    6,
    "a decode step under each storage and rope mode traces with fullgraph, no recompilation over 1,000 steps",
    "hf/test_compile.py::test_a_thousand_steps_in_every_layout_are_compiled_once",
)

held(
    7,
    "C++ chooses what torch and the interpreter choose: ties, NaN, windows, pages",
    "differential/test_selecting.py::test_chooses_what_torch_chooses",
    "differential/test_selecting.py::test_chooses_the_pages_that_torch_chooses",
)
held(
    7,
    "T >= live equals dense attention to the bit; D = head size equals the oracle's top T; D > head size is refused",
    "differential/test_selecting.py::test_all_that_there_is_equals_dense_attention",
    "differential/test_selecting.py::test_all_dims_choose_as_the_whole_product_does",
    "differential/test_selecting.py::test_more_dims_than_keys_have_are_refused",
)
held(
    7,
    "storage grows by a quarter, and nothing is copied in between",
    "differential/test_selecting.py::test_growth_copies_only_when_it_is_full",
)
held(7, "eviction and selection together", "differential/test_selecting.py::test_what_was_evicted_is_not_chosen")

held(
    8,
    "columns equal those of a float64 matrix to 1e-5: causal, windowed, padded, grouped, capped",
    "runtime/test_prefill.py::test_columns_and_outputs",
)
held(8, "the victims are the interpreter's", "differential/test_statements.py")
held(
    8,
    "nothing is of the size of queries x slots; a score of the last W queries looks at W queries",
    "runtime/test_prefill.py::test_nothing_is_of_the_size_of_queries_times_slots",
    "runtime/test_prefill.py::test_only_the_queries_that_matter",
)
held(
    8,
    "blocks of one token equal decoding, and do not depend on how the prompt is cut",
    "runtime/test_prefill.py::test_blocks_of_one_are_the_same_as_decoding",
    "differential/test_statements.py::test_blocks_do_not_depend_on_how_the_prompt_is_cut",
)
held(
    8,
    "a whole prompt is held in one layer at a time",
    "hf/test_memory.py::test_a_whole_prompt_is_held_in_one_layer_at_a_time",
)

held(9, "`kvdsl reproduce` knows all five papers", "reproduce/test_papers.py::test_help_names_every_paper")
held(9, "reproduce PAPER --quick: tables and figures, the files beside them", "reproduce/test_papers.py::test_quick")
held(9, "a killed run loses one cell, and goes on", "reproduce/test_framework.py::test_a_killed_run_loses_one_cell")
held(
    9,
    "figure 2's consistency is that of a brute-force simulation, figure 3's deviation NumPy's",
    "eval/test_attention_measures.py::test_consistency_by_brute_force",
    "eval/test_attention_measures.py::test_deviations_are_those_of_numpy",
)
held(
    9,
    "kvdsl trace: the page's data are what cache.positions said, step by step; nothing is fetched; in a headless browser",
    "eval/test_trace.py",
    "eval/test_trace_browser.py",
)
held(9, "LongBench and RULER from local files, with the official metrics", "eval/test_benchmarks.py")
held(9, "lm_eval through any kvdsl cache (`make test-lm-eval`)", "eval/test_lm_eval.py")
held(
    9,
    "a .kv policy as a press of kvpress keeps what its own cache keeps, in kvpress's pipeline too (`make peers`)",
    "integrations/test_kvpress.py",
)
