"""The baseline loss that is logged before training."""

from pathlib import Path

from tests.token_shards import drawn_documents, write_shards
from torchtitan.checks import load_job
from torchtitan.trainer import report_reference

RECIPE = Path(__file__).parents[2] / "train_configs/debug_model.toml"


def test_it_reads_no_further_than_the_run(tmp_path, caplog):
    """A source that is read once may end after the run."""
    tokens = write_shards(tmp_path / "tokens", drawn_documents(40))
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'extends = "{RECIPE}"\n[[data.sources]]\npath = "{tokens}"\nweight = 1\n'
        "[training]\nseq_len = 16\nsteps = 5\n",
        encoding="utf-8",
    )
    job = load_job(recipe, ["--lr_scheduler.warmup_steps=1"], 1, "cpu").config
    with caplog.at_level("INFO", "torchtitan"):
        report_reference(job)
    assert "a unigram model of this text has loss 5." in caplog.text
