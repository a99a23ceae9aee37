"""Names are those of the plain model wherever one is shown or written."""

from tests.loading import wrapping


def test_no_report_state_file_or_error_has_the_names_of_wrappers(worlds, qwen3, tmp_path):
    shown = worlds(2).run(wrapping.shown, str(qwen3), str(tmp_path))[1]
    for what, text in shown.items():
        assert "_orig_mod" not in text, what
        assert "_checkpoint_wrapped_module" not in text, what
    for what in ("shard, Classes(names=('Qwen3DecoderLayer',))", "save", "state", "load", "checkpoint", "missing"):
        assert "layers" in shown[what] or "tensors" in shown[what], what
    assert "'model.layers.0', 'model.layers.1'" in shown["shard, Classes(names=('Qwen3DecoderLayer',))"]
    assert "model.added.weight" in shown["differing"]
