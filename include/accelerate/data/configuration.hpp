#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <optional>

namespace accelerate::data {

/// How all loaders of a program are prepared. The names are Python Accelerate's.
struct DataLoaderConfiguration {
  /// True: the plan's batch size is that of all processes together, and each batch is cut into one
  /// piece per process; it must be a multiple of the number of processes. False: every process gets
  /// batches of the plan's batch size.
  TORCH_ARG(bool, split_batches) = false;
  /// True: process 0 reads everything and sends the others their part. Unset: only for iterable
  /// datasets, as in the original.
  TORCH_ARG(std::optional<bool>, dispatch_batches);
  /// True: the last step is filled up with samples from the start of the pass, so that every
  /// process takes part in every step with batches of one size. Metrics still count each sample
  /// once, see LoaderProgress. False: the last batches are short or missing on the last processes.
  TORCH_ARG(bool, even_batches) = true;
  /// True: the order of an epoch is a function of seed and epoch alone. That is what makes it equal
  /// on all processes and reproducible after a resume, and so it is the default here (the
  /// original's is false). False: the seed of each pass is drawn from LibTorch's default generator
  /// on process 0.
  TORCH_ARG(bool, use_seedable_sampler) = true;
  /// Seed of the order of samples; unset: the one given to prepare.
  TORCH_ARG(std::optional<std::int64_t>, data_seed);
  /// True: copies to the device return before they are done. Always so for batches that are copied
  /// ahead of use (see `prefetch_to_device`).
  TORCH_ARG(bool, non_blocking) = false;
  /// True: the dataset is cut into one contiguous part per node and the processes of a node share
  /// only its part, so that a node reads the same files in every epoch. Needs the same number of
  /// processes on every node.
  TORCH_ARG(bool, by_node) = false;
  /// True: batches are put into page-locked memory before they are copied to an accelerator.
  TORCH_ARG(bool, pin_memory) = true;
  /// Batches that are copied to the accelerator ahead of use, on a stream of their own. 0: a batch
  /// is copied when it is asked for. Without effect on the CPU.
  TORCH_ARG(std::int64_t, prefetch_to_device) = 1;
  /// True: the structure of the first batch and the size of the dataset are compared over the
  /// processes, once per loader. Every process must then iterate the loader.
  TORCH_ARG(bool, compare_across_processes) = true;
};

}  // namespace accelerate::data
