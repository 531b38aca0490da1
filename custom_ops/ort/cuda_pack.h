// The kernel pack: its manifest, the choice of an image for a device, and launches.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ort/cuda_arguments.h"
#include "ort/cuda_driver.h"

namespace qknorm::cuda {

// The pack is missing, damaged, of another format, or has no image for what is asked; the message says which.
class PackError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Parameter {
  enum class Type { kPointer, kInt32, kInt64, kFloat };
  Type type;
  int64_t divisor;  // values must be multiples of it
};

// What an image can do, and what a launch asks for.
struct Features {
  KernelKind kernel;
  int32_t dtype;
  int64_t padded;  // head size; 0 for kernels without one
  bool interleaved;
  bool statistics;
  bool capped;
  bool masked;
};

struct Image {
  Features features;
  bool hinted;
  int32_t capability;
  bool exact;  // runs on this capability only
  bool is_ptx;
  std::string file;
  std::string sha256;
  int64_t bytes;
  std::string entry;
  uint32_t warps;
  uint32_t shared;
  int64_t rows;  // of a tile
  const std::vector<Parameter>* parameters;

  std::string name() const;
};

class Pack {
 public:
  // Reads `folder`/manifest.json. Throws PackError.
  explicit Pack(std::string folder);
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;

  // The best image that serves `wanted` with these arguments on the device. Throws PackError with the reason.
  const Image& choose(const Features& wanted, const Arguments& arguments, const DeviceFacts& device) const;

  // Loads the image into the context where it is not, and launches it. Throws DriverError, PackError.
  void launch(const Image& image, const Arguments& arguments, const uint32_t (&grid)[3], Context context,
              Stream stream);

  // The argument block as the kernel reads it: natural alignment, then two null pointers.
  static std::vector<unsigned char> parameter_block(const Image& image, const Arguments& arguments);

 private:
  Function load(const Image& image, Context context);
  std::vector<char> read_image(const Image& image) const;

  std::string folder_;
  std::vector<std::unique_ptr<const std::vector<Parameter>>> parameter_lists_;
  std::vector<Image> images_;
  std::mutex mutex_;
  std::map<std::pair<Context, const Image*>, Function> functions_;
};

// The pack beside this library, or where `use_pack` said; opened at first use. Throws PackError.
Pack& shared_pack();
void use_pack(const std::string& folder);

}  // namespace qknorm::cuda
