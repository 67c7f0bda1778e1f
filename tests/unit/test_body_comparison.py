"""The comparison that the fidelity test stands on."""

from tests.ray.fidelity.compare import differences


def test_ids_and_times_may_differ_and_nothing_else() -> None:
    one = {"id": "a", "created": 1, "choices": [{"text": "x", "index": 0}]}
    other = {"id": "b", "created": 2, "choices": [{"text": "y", "index": 0}]}
    assert list(differences(one, other)) == ["$.choices[0].text: expected 'x', got 'y'"]


def test_a_field_that_is_missing_or_new_is_told_by_its_path() -> None:
    assert list(differences({"a": {"b": None}}, {"a": {"c": 1}})) == [
        "$.a.b: missing, expected None",
        "$.a.c: not expected, got 1",
    ]


def test_an_id_of_another_type_is_a_difference() -> None:
    assert list(differences({"id": "x"}, {"id": None})) == ["$.id: expected a str, got a NoneType"]


def test_numbers_of_different_types_and_lists_of_different_length_differ() -> None:
    assert list(differences([1, 2], [1.0])) == ["$: expected 2 items, got 1", "$[0]: expected 1, got 1.0"]
