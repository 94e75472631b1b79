"""What check_origins.py accepts and refuses."""

import tempfile
import unittest
from pathlib import Path

import check_origins as check

STATUS = """Package: g++
Status: install ok installed
Depends: cpp (>= 4:12), g++-12 (>= 12.2) | g++-13
Provides: c++-compiler, c++abi2-dev

Package: g++-12
Status: install ok installed
Depends: libc-dev
Pre-Depends: libgcc-12-dev

Package: libc6-dev
Status: install ok installed
Provides: libc-dev

Package: cuda-headers
Status: install ok installed

Package: removed
Status: deinstall ok config-files
Depends: cuda-headers
"""


class Packages(unittest.TestCase):
    def test_setup_names_its_packages(self):
        setup = (Path(__file__).parents[2] / "tools" / "setup").read_text()
        named = check.named_by_setup(setup)
        self.assertTrue({"g++", "libopenmpi-dev", "libxxhash-dev", "libgtest-dev"} <= named, named)

    def test_what_a_package_depends_on_is_brought(self):
        reached = check.closure({"g++"}, *check.dependencies(STATUS))
        self.assertTrue({"g++-12", "libgcc-12-dev", "libc6-dev"} <= reached, reached)
        self.assertNotIn("cuda-headers", reached)
        self.assertNotIn("cuda-headers", check.closure({"removed"}, *check.dependencies(STATUS)))


class Files(unittest.TestCase):
    def test_a_header_of_this_machine_alone_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder).resolve()
            project, toolkit = here / "project", here / "usr" / "local" / "include"
            for each in (project, toolkit):
                each.mkdir(parents=True)
            own, stray = project / "own.hpp", toolkit / "cuda_runtime.h"
            own.touch()
            stray.touch()
            used = {own: "a.o", stray: "nccl_backend.cpp.o", Path("/usr/include/stdio.h"): "a.o", Path("/usr/include/cuda.h"): "b.o"}
            owner_of = {"/usr/include/stdio.h": {"libc6-dev"}, "/usr/include/cuda.h": {"cuda-headers"}}
            found = list(check.strangers(used, [project], owner_of, {"libc6-dev"}))
        self.assertEqual(len(found), 2, found)
        self.assertIn("cuda-headers", found[1])
        self.assertIn("nccl_backend.cpp.o uses", found[0])
        self.assertIn("of no package", found[0])

    def test_a_link_out_of_the_project_does_not_hide_where_it_leads(self):
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder).resolve()
            (here / "project").mkdir()
            (here / "outside.h").touch()
            link = here / "project" / "link.h"
            link.symlink_to(here / "outside.h")
            self.assertEqual(len(list(check.strangers({link: "a.o"}, [here / "project"], {}, set()))), 1)


if __name__ == "__main__":
    unittest.main()
