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
    ],
)
def test_settings_that_are_none_are_named_in_one_line(said: dict[str, Any], tmp_path: Path) -> None:
    generation(tmp_path, decoder_start_token_id=2, **said)
    with pytest.raises(JobError, match=next(iter(said))) as error:
        source_config(config(), tmp_path, 20, 50)
    assert "\n" not in str(error.value)


def test_without_settings_of_generation_the_configuration_counts(tmp_path: Path) -> None:
    assert source_config(config(decoder_start_token_id=4), tmp_path, 20, 50).start == (4,)
    with pytest.raises(JobError, match="decoder_start_token_id"):
        source_config(config(), tmp_path, 20, 50)
    with pytest.raises(JobError, match="other tokens"):
        source_config(config(decoder_start_token_id=4, decoder_vocab_size=60), tmp_path, 20, 50)


def test_sound_has_frames_and_tokens_that_are_withheld(tmp_path: Path) -> None:
    hears = config(num_mel_bins=80, max_source_positions=1500)
    said = {"decoder_start_token_id": 1, "suppress_tokens": [3, 60, -1], "begin_suppress_tokens": [5]}
    found = source_config(hears, generation(tmp_path, **said), 448, 50)
    assert (found.length, found.channels, found.suppress_tokens, found.begin_suppress_tokens) == (
        3000,
        80,
        (3,),
        (5,),
    )
    assert found.unit_bytes * found.length == 960_000
