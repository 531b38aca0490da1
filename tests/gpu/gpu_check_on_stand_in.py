"""The GPU check's dry run with the compiled-pack step: the stand-in driver runs each launch in Triton's interpreter.

Arguments: a folder to work in, a call of the driver that fails ("" for none), and what `gpu_check` takes.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from tests.gpu import interpreter

interpreter.start()

from benchmarks import gpu_check  # noqa: E402
from tests.gpu.fake_pack import write_fake_pack  # noqa: E402
from tests.gpu.stand_in_driver import StandInDriver, build_stand_in  # noqa: E402

if __name__ == "__main__":
    folder, failing, *arguments = sys.argv[1:]
    pack = pathlib.Path(folder) / "pack"
    write_fake_pack(pack, capabilities=(90,))
    driver = StandInDriver(build_stand_in(pathlib.Path(folder)), pack=pack)
    if failing:
        driver.fail(failing, 719)
    code = gpu_check.main(["--dry-run", "--pack", str(pack), *arguments])
    if driver.errors:
        raise driver.errors[0]
    sys.stdout.write(f"launches: {len(driver.launches)}\n")
    sys.exit(code)
