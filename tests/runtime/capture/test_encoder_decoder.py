"""What a directory says of what its encoder-decoder reads, and of what its answers follow."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.runtime.capture.encoder_decoder import reads_source, source_config
from fusion.runtime.job.errors import JobError


def config(**said: Any) -> Any:
    return SimpleNamespace(**{"vocab_size": 50, "is_encoder_decoder": True, **said})


def generation(folder: Path, **said: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(said))
    return folder


def test_a_family_with_an_encoder_may_be_saved_as_a_decoder_alone() -> None:
    assert reads_source(config(architectures=["BartForConditionalGeneration"]))
    assert reads_source(config(architectures=None))
    assert not reads_source(config(architectures=["BartForCausalLM"]))
    assert not reads_source(config(is_encoder_decoder=False))
    assert not reads_source(SimpleNamespace())


@pytest.mark.parametrize(
    ("said", "start"),
    [
        ({"decoder_start_token_id": 2}, (2,)),
        ({"decoder_start_token_id": 2, "forced_bos_token_id": 0}, (2, 0)),
        ({"bos_token_id": 7}, (7,)),
        ({"decoder_start_token_id": 9, "forced_decoder_ids": [[1, 3], [2, 4]]}, (9, 3, 4)),
        (
            {"decoder_start_token_id": 9, "forced_decoder_ids": [[1, None], [2, 4]]},
            (9,),
        ),  # the model says the language
        ({"decoder_start_token_id": 9, "no_timestamps_token_id": 8}, (9, 8)),
        ({"decoder_start_token_id": 9, "no_timestamps_token_id": 8, "is_multilingual": True}, (9,)),
    ],
)
def test_answers_follow_what_the_files_say(
    said: dict[str, Any], start: tuple[int, ...], tmp_path: Path
) -> None:
    found = source_config(config(), generation(tmp_path, **said), 20, 50)
    assert (found.start, found.length, found.channels) == (start, 20, 0)


@pytest.mark.parametrize(
    "said",
    [
        *({"forced_decoder_ids": value} for value in (5, [5], [[1]], [[1, 2, 3]], [[1, "a"]])),
        *({"suppress_tokens": value} for value in (5, ["a"], [[1]], {"a": 1})),
        *({"begin_suppress_tokens": value} for value in (True, [None], [1.5])),
        *(
            {"bad_words_ids": value}
            for value in (5, [5], [[]], [["a"]], [[-1]], [[True]], [[4, 5]], {"a": 1})
        ),
    ],
)
def test_settings_that_are_none_are_named_in_one_line(said: dict[str, Any], tmp_path: Path) -> None:
    generation(tmp_path, decoder_start_token_id=2, **said)
    with pytest.raises(JobError, match=next(iter(said))) as error:
        source_config(config(), tmp_path, 20, 50)
    assert "\n" not in str(error.value)


def written(folder: Path, **said: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_without_settings_of_generation_the_configuration_counts(tmp_path: Path) -> None:
    written(tmp_path)
    assert source_config(config(decoder_start_token_id=4), tmp_path, 20, 50).start == (4,)
    with pytest.raises(JobError, match="decoder_start_token_id"):
        source_config(config(), tmp_path, 20, 50)
    with pytest.raises(JobError, match="other tokens"):
        source_config(config(decoder_start_token_id=4, decoder_vocab_size=60), tmp_path, 20, 50)


def test_what_a_configuration_drops_of_its_file_counts_as_well(tmp_path: Path) -> None:
    """Settings of generation, which are read from there where they have no file of their own."""
    written(tmp_path, forced_bos_token_id=7, suppress_tokens=[3], begin_suppress_tokens=None)
    kept = config(decoder_start_token_id=4, begin_suppress_tokens=(5, 6), suppress_tokens=(9,))
    found = source_config(kept, tmp_path, 20, 50)
    assert (found.start, found.suppress_tokens, found.begin_suppress_tokens) == ((4, 7), (3,), ())
    written(tmp_path)
    found = source_config(kept, tmp_path, 20, 50)
    assert (found.start, found.suppress_tokens, found.begin_suppress_tokens) == ((4,), (9,), (5, 6))


def test_words_of_one_token_are_withheld_and_ends_are_not(tmp_path: Path) -> None:
    """As `generate()` does, which Marian's files have it leave out what sources are padded with."""
    generation(tmp_path, decoder_start_token_id=2, bad_words_ids=[[7], [3], [1], [60]], suppress_tokens=[1])
    assert source_config(config(), tmp_path, 20, 50, ends=(3,)).suppress_tokens == (1, 7)


def test_sound_has_frames_and_tokens_that_are_withheld(tmp_path: Path) -> None:
    hears = config(num_mel_bins=80, max_source_positions=1500, max_target_positions=448)
    said = {"decoder_start_token_id": 1, "suppress_tokens": [3, 60, -1], "begin_suppress_tokens": [5]}
    found = source_config(hears, generation(tmp_path, **said), 448, 50)
    assert (found.length, found.channels, found.suppress_tokens, found.begin_suppress_tokens) == (
        3000,
        80,
        (3,),
        (5,),
    )
    assert found.unit_bytes * found.length == 960_000


@pytest.mark.parametrize("missing", ["max_source_positions", "max_target_positions"])
def test_sound_of_a_length_that_is_not_said_is_refused_in_one_line(missing: str, tmp_path: Path) -> None:
    """As SpeechT5's, which has no frames that are heard together."""
    said = {"num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 448}
    del said[missing]
    with pytest.raises(JobError, match=f"says no {missing}") as error:
        source_config(config(**said), generation(tmp_path, decoder_start_token_id=1), 448, 50)
    assert "\n" not in str(error.value)
