#pragma once

namespace accelerate::io {

// A write beyond the limit of a file's size (`ulimit -f`) ends the process by SIGXFSZ, unless the
// program handles the signal: from now on it fails with EFBIG. Called before files are written.
void signal_of_large_files_is_an_error();

}  // namespace accelerate::io
