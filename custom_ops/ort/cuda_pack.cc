#include "ort/cuda_pack.h"

#include <dlfcn.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <tuple>

#include "ort/cuda_json.h"

namespace qknorm::cuda {
namespace {

constexpr int64_t kFormat = 1;
constexpr uint32_t kSharedWithoutAsking = 48 * 1024;

const std::pair<const char*, int32_t> kTypes[] = {
    {"float32", QKNORM_FLOAT}, {"float16", QKNORM_FLOAT16}, {"bfloat16", QKNORM_BFLOAT16}};

std::string type_text(int32_t dtype) {
  for (const auto& [name, code] : kTypes) {
    if (code == dtype) return name;
  }
  return "type " + std::to_string(dtype);
}

int32_t type_code(const std::string& text) {
  for (const auto& [name, code] : kTypes) {
    if (text == name) return code;
  }
  throw PackError("unknown type '" + text + "'");
}

KernelKind kernel_kind(const std::string& text) {
  for (size_t i = 0; i < std::size(kKernelNames); ++i) {
    if (text == kKernelNames[i]) return static_cast<KernelKind>(i);
  }
  throw PackError("unknown kernel '" + text + "'");
}

const char* kernel_name(const Features& features) { return kKernelNames[static_cast<size_t>(features.kernel)]; }

std::string feature_text(const Features& f) {
  std::string text = std::string(kernel_name(f)) + " in " + type_text(f.dtype);
  if (f.padded > 0) text += ", heads of " + std::to_string(f.padded);
  if (f.interleaved) text += ", interleaved rotary pairs";
  if (f.statistics) text += ", rows over several heads or groups";
  if (f.capped) text += ", softcap or clamp";
  if (f.masked) text += ", attention_bias";
  return text;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (!file || !(content << file.rdbuf())) {
    throw PackError("the CUDA kernel pack lacks " + path +
                    "; make one with python -m qknorm_onnx.custom_ops.compile_kernels, or run on the CPU provider");
  }
  return content.str();
}

Parameter read_parameter(const Json& row) {
  const std::string& type = row.list().at(1).text();
  const int64_t divisor = row.list().at(2).integer();
  if (type.rfind('*', 0) == 0) return {Parameter::Type::kPointer, divisor};
  if (type == "i32") return {Parameter::Type::kInt32, divisor};
  if (type == "i64") return {Parameter::Type::kInt64, divisor};
  if (type == "fp32") return {Parameter::Type::kFloat, divisor};
  throw PackError("unknown parameter type '" + type + "'");
}

void check_names(KernelKind kernel, const Json& list) {
  const std::vector<std::string> names = parameter_names(kernel);
  bool same = list.list().size() == names.size();
  for (size_t i = 0; same && i < names.size(); ++i) same = list.list()[i].list().at(0).text() == names[i];
  if (!same) {
    throw PackError(std::string("the parameters of ") + kKernelNames[static_cast<size_t>(kernel)] +
                    " are not those that this library passes; the pack and the library are of different versions");
  }
}

Image read_entry(const Json& entry) {
  Image image{};
  image.features = {kernel_kind(entry.at("kernel").text()), type_code(entry.at("dtype").text()),
                    entry.at("padded").integer(),           entry.at("interleaved").integer() != 0,
                    entry.at("statistics").integer() != 0,  entry.at("capped").integer() != 0,
                    entry.at("masked").integer() != 0};
  image.hinted = entry.at("hinted").integer() != 0;
  image.capability = static_cast<int32_t>(entry.at("capability").integer());
  image.exact = entry.at("exact").integer() != 0;
  image.is_ptx = entry.at("form").text() == "ptx";
  image.file = entry.at("file").text();
  image.sha256 = entry.at("sha256").text();
  image.bytes = entry.at("bytes").integer();
  image.entry = entry.at("entry").text();
  image.warps = static_cast<uint32_t>(entry.at("warps").integer());
  image.shared = static_cast<uint32_t>(entry.at("shared").integer());
  image.rows = entry.at("rows").integer();
  if (image.file.find('/') != std::string::npos) throw PackError("an image's file name has a folder");
  return image;
}

bool runs_on(const Image& image, const DeviceFacts& device) {
  if (image.is_ptx) return image.capability <= device.capability;
  if (image.exact) return image.capability == device.capability;
  return image.capability / 10 == device.capability / 10 && image.capability <= device.capability;
}

bool serves(const Features& has, const Features& wanted) {
  return has.kernel == wanted.kernel && has.dtype == wanted.dtype && has.padded >= wanted.padded &&
         has.interleaved == wanted.interleaved && has.statistics == wanted.statistics &&
         (has.capped || !wanted.capped) && (has.masked || !wanted.masked);
}

// The partial results of decode have its padded head size: combine must match it.
bool matches_exactly(const Features& has, const Features& wanted) {
  return wanted.kernel != KernelKind::kCombine || has.padded == wanted.padded;
}

bool hints_hold(const Image& image, const Arguments& arguments) {
  for (size_t i = 0; i < image.parameters->size(); ++i) {
    const int64_t divisor = (*image.parameters)[i].divisor;
    if (divisor > 1 && arguments.values()[i].integer % divisor != 0) return false;
  }
  return true;
}

// Smaller is better: compiled code before PTX, hints, the least padding and features, the newest code.
auto cost(const Image& image) {
  return std::tuple(image.is_ptx, !image.hinted, image.features.padded, image.features.masked, image.features.capped,
                    -image.capability);
}

std::string folder_of_library() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&folder_of_library), &info) == 0 || info.dli_fname == nullptr) return ".";
  const std::string path = info.dli_fname;
  const size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::mutex pack_mutex;
std::string pack_folder;
std::map<std::string, std::unique_ptr<Pack>>& packs() {
  static std::map<std::string, std::unique_ptr<Pack>> opened;
  return opened;
}

}  // namespace

std::string Image::name() const {
  return std::string(kernel_name(features)) + " (" + (is_ptx ? "PTX" : "cubin") + " " + file + ")";
}

Pack::Pack(std::string folder) : folder_(std::move(folder)) {
  const std::string path = folder_ + "/manifest.json";
  const std::string text = read_file(path);
  try {
    const Json manifest = Json::parse(text);
    if (manifest.at("format").integer() != kFormat) {
      throw PackError("format " + std::to_string(manifest.at("format").integer()) + " is unknown; this library reads " +
                      std::to_string(kFormat));
    }
    const std::vector<Json>& lists = manifest.at("parameter_lists").list();
    for (const Json& list : lists) {
      auto parameters = std::make_unique<std::vector<Parameter>>();
      for (const Json& row : list.list()) parameters->push_back(read_parameter(row));
      parameter_lists_.push_back(std::move(parameters));
    }
    for (const Json& entry : manifest.at("images").list()) {
      Image image = read_entry(entry);
      const auto number = static_cast<size_t>(entry.at("parameters").integer());
      check_names(image.features.kernel, lists.at(number));
      image.parameters = parameter_lists_.at(number).get();
      images_.push_back(std::move(image));
    }
  } catch (const std::exception& error) {
    throw PackError(path + ": " + error.what());
  }
}

const Image& Pack::choose(const Features& wanted, const Arguments& arguments, const DeviceFacts& device) const {
  const Image* best = nullptr;
  bool one_serves = false;
  for (const Image& image : images_) {
    if (!serves(image.features, wanted) || !matches_exactly(image.features, wanted)) continue;
    one_serves = true;
    if (!runs_on(image, device) || image.shared > static_cast<uint32_t>(device.shared_limit)) continue;
    if (!hints_hold(image, arguments)) continue;
    if (best == nullptr || cost(image) < cost(*best)) best = &image;
  }
  if (best != nullptr) return *best;
  const std::string device_text =
      "compute capability " + std::to_string(device.capability / 10) + "." + std::to_string(device.capability % 10);
  throw PackError("the CUDA kernel pack in " + folder_ + " has no kernel for " + feature_text(wanted) +
                  (one_serves ? " on " + device_text : ""));
}

std::vector<unsigned char> Pack::parameter_block(const Image& image, const Arguments& arguments) {
  std::vector<unsigned char> block;
  const auto append = [&block](const void* value, size_t size) {
    block.resize((block.size() + size - 1) / size * size);
    const auto* bytes = static_cast<const unsigned char*>(value);
    block.insert(block.end(), bytes, bytes + size);
  };
  for (size_t i = 0; i < image.parameters->size(); ++i) {
    const Value& value = arguments.values()[i];
    const auto narrow = static_cast<int32_t>(value.integer);
    const auto real = static_cast<float>(value.real);
    switch ((*image.parameters)[i].type) {
      case Parameter::Type::kInt32:
        if (narrow != value.integer) {
          throw PackError("an argument of " + image.name() + " is " + std::to_string(value.integer) +
                          "; it must fit 32 bits");
        }
        append(&narrow, sizeof(narrow));
        break;
      case Parameter::Type::kFloat:
        append(&real, sizeof(real));
        break;
      case Parameter::Type::kPointer:
      case Parameter::Type::kInt64:
        append(&value.integer, sizeof(value.integer));
        break;
    }
  }
  const int64_t scratch = 0;
  append(&scratch, sizeof(scratch));
  append(&scratch, sizeof(scratch));
  return block;
}

void Pack::launch(const Image& image, const Arguments& arguments, const uint32_t (&grid)[3], Context context,
                  Stream stream) {
  const Function function = load(image, context);
  std::vector<unsigned char> block = parameter_block(image, arguments);
  size_t size = block.size();
  // CU_LAUNCH_PARAM_BUFFER_POINTER, its value, CU_LAUNCH_PARAM_BUFFER_SIZE, its value, CU_LAUNCH_PARAM_END
  void* extra[] = {reinterpret_cast<void*>(1), block.data(), reinterpret_cast<void*>(2), &size, nullptr};
  const Driver& cuda = driver();
  cuda.check(
      cuda.launch(function, grid[0], grid[1], grid[2], 32 * image.warps, 1, 1, image.shared, stream, nullptr, extra),
      "cuLaunchKernel of " + image.name());
}

std::vector<char> Pack::read_image(const Image& image) const {
  const std::string content = read_file(folder_ + "/" + image.file);
  if (static_cast<int64_t>(content.size()) != image.bytes) {
    throw PackError(folder_ + "/" + image.file + " has " + std::to_string(content.size()) + " bytes; " +
                    std::to_string(image.bytes) + " are expected: the pack is damaged");
  }
  return {content.begin(), content.end()};
}

Function Pack::load(const Image& image, Context context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto key = std::make_pair(context, &image);
  const auto found = functions_.find(key);
  if (found != functions_.end()) return found->second;
  const Driver& cuda = driver();
  const std::vector<char> content = read_image(image);
  Module module = nullptr;
  cuda.check(cuda.load_module(&module, content.data()), "cuModuleLoadData of " + image.name());
  Function function = nullptr;
  cuda.check(cuda.get_function(&function, module, image.entry.c_str()), "cuModuleGetFunction of " + image.name());
  if (image.shared > kSharedWithoutAsking) {
    cuda.check(
        cuda.set_function_attribute(function, kMaxDynamicSharedMemory, static_cast<int32_t>(image.shared)),
        "cuFuncSetAttribute of " + image.name() + " for " + std::to_string(image.shared) + " bytes of shared memory");
  }
  return functions_.emplace(key, function).first->second;
}

Pack& shared_pack() {
  const std::lock_guard<std::mutex> lock(pack_mutex);
  const std::string folder = pack_folder.empty() ? folder_of_library() + "/cuda_kernels" : pack_folder;
  std::unique_ptr<Pack>& pack = packs()[folder];
  if (pack == nullptr) pack = std::make_unique<Pack>(folder);
  return *pack;
}

void use_pack(const std::string& folder) {
  const std::lock_guard<std::mutex> lock(pack_mutex);
  pack_folder = folder;
}

}  // namespace qknorm::cuda
