"""What holds for every test."""

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny: threads that wait for each other cost ten times what they save


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Runs captures of a small model in processes of their own, which may be killed."""
    from tests import small
    from tests.driver import Driver

    folder = tmp_path_factory.mktemp("driver")
    driver = Driver(folder, small.settings(folder))
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def whole(driver, tmp_path_factory):
    """What a run that nobody disturbed has written."""
    from tests.driver import contents

    out = tmp_path_factory.mktemp("whole") / "c.zarr"
    assert driver.run(out).status == "done"
    return contents(out)
