from plimsoll_engine.device_watch import DeviceWatch
from support.scripted_executor import MIB, ScriptedExecutor


def test_the_low_water_is_that_of_the_last_minute_and_then_forgotten() -> None:
    executor = ScriptedExecutor()
    watch = DeviceWatch(executor, 0.0, lambda: executor.committed * MIB)
    resting = watch.latest.free
    executor.bytes_elsewhere = 10 * MIB
    watch.measure(5.0)
    executor.bytes_elsewhere = 0
    watch.measure(6.0)
    assert watch.latest.free == resting
    assert watch.measure(60.0).free_low_water == resting - 10 * MIB
    assert watch.measure(66.0).free_low_water == resting


def test_the_device_is_not_asked_in_every_step() -> None:
    executor = ScriptedExecutor()
    watch = DeviceWatch(executor, 0.0, lambda: executor.committed * MIB)
    executor.bytes_elsewhere = 10 * MIB
    before = watch.latest
    watch.measure_if_due(0.1)
    assert watch.latest is before
    watch.measure_if_due(0.3)
    assert watch.latest.free == before.free - 10 * MIB
    # A clock that was set back is no reason to stop measuring.
    executor.bytes_elsewhere = 0
    watch.measure_if_due(-100.0)
    assert watch.latest.free == before.free


def test_a_pool_that_shrinks_is_not_taken_for_what_steps_need() -> None:
    executor = ScriptedExecutor()
    executor.resize_kv(50)
    watch = DeviceWatch(executor, 0.0, lambda: executor.committed * MIB)
    beside = watch.peak_beside_kv
    executor.resize_kv(10)
    watch.measure(1.0)
    assert watch.peak_beside_kv == beside
    # A step takes 7 MiB and gives them back before the next measurement.
    executor.bytes_elsewhere = 7 * MIB
    executor.memory()
    executor.bytes_elsewhere = 0
    watch.measure(2.0)
    assert watch.peak_beside_kv == beside + 7 * MIB


def test_a_resized_pool_is_measured_at_once() -> None:
    executor = ScriptedExecutor()
    watch = DeviceWatch(executor, 0.0, lambda: executor.committed * MIB)
    before = watch.latest.free
    executor.resize_kv(50)
    watch.measure_if_due(0.01)
    assert watch.latest.free == before - 50 * MIB
