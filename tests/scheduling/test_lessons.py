"""Steps are learned of in their order, the last ones not yet."""

from vllm_specinfer.scheduling.lessons import Lessons


def test_steps_in_flight_wait():
    lessons, learned = Lessons(), []
    for step in range(4):
        for part in "ab":
            lessons.add(lambda of=(step, part): learned.append(of))
        lessons.learn(in_flight=2)
        assert learned == [(s, p) for s in range(step - 1) for p in "ab"]
        lessons.end_step()
    lessons.learn()
    assert learned == [(s, p) for s in range(4) for p in "ab"]
    lessons.add(lambda: learned.append("next"))
    lessons.learn(in_flight=1)
    lessons.learn()
    assert learned[8:] == ["next"]
