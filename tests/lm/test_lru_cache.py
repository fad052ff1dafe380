"""A least-recently-used cache that is bounded by bytes."""

from lrl.lm.fixed_batches import LRUCache


def test_the_least_recently_used_go_first():
    memory = LRUCache[str](10)
    for key in "abc":
        memory.put(key, key.upper(), 3)
    assert memory.get("a") == "A" and memory.bytes == 9
    memory.put("d", "D", 4)
    assert memory.get("b") is None and memory.get("a") == "A" and memory.bytes == 10
    memory.put("a", "other", 9)  # what is kept stays, and becomes the most recently used
    assert memory.get("a") == "A" and memory.bytes == 10
    memory.shrink(7)
    assert [memory.get(key) for key in "acd"] == ["A", None, "D"]
    memory.put("e", "E", 11)
    assert len(memory) == 0 and memory.bytes == 0
    memory.put("f", "F", 1)
    memory.clear()
    assert memory.get("f") is None and memory.bytes == 0


def test_a_size_of_0_keeps_nothing():
    memory = LRUCache[int](0)
    memory.put("a", 1, 1)
    assert memory.get("a") is None
