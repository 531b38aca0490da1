#include "ort/attributes.h"

#include <cstring>
#include <optional>
#include <vector>

namespace qknorm::ort {
namespace {

class Reader {
 public:
  Reader(const Api& api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  std::optional<int64_t> integer(const char* name) const {
    int64_t value = 0;
    if (!succeeded(api_, api_.KernelInfoGetAttribute_int64()(info_, name, &value))) return std::nullopt;
    return value;
  }

  std::optional<float> real(const char* name) const {
    float value = 0;
    if (!succeeded(api_, api_.KernelInfoGetAttribute_float()(info_, name, &value))) return std::nullopt;
    return value;
  }

  std::optional<std::string> text(const char* name) const {
    size_t size = 0;
    if (!succeeded(api_, api_.KernelInfoGetAttribute_string()(info_, name, nullptr, &size))) return std::nullopt;
    std::vector<char> value(size + 1, '\0');
    if (!succeeded(api_, api_.KernelInfoGetAttribute_string()(info_, name, value.data(), &size))) return std::nullopt;
    return std::string(value.data());
  }

  // Reading with the wrong kind fails as reading nothing does, so every other kind is tried before "missing" is said.
  const char* other_kind(const char* name) const {
    if (integer(name)) return "an int";
    if (real(name)) return "a float";
    if (text(name)) return "a string";
    size_t size = 0;
    if (succeeded(api_, api_.KernelInfoGetAttributeArray_int64()(info_, name, nullptr, &size))) return "a list of ints";
    size = 0;
    if (succeeded(api_, api_.KernelInfoGetAttributeArray_float()(info_, name, nullptr, &size))) {
      return "a list of floats";
    }
    return nullptr;
  }

 private:
  const Api& api_;
  const OrtKernelInfo* info_;
};

int64_t index_of_choice(const spec::AttributeRow& row, const std::string& value) {
  std::string known;
  for (size_t i = 0; i < row.choice_count; ++i) {
    if (value == row.choices[i]) return static_cast<int64_t>(i);
    known += (i ? ", '" : "'") + std::string(row.choices[i]) + "'";
  }
  throw InvalidArgument(std::string("attribute ") + row.name + " is '" + value + "'; it must be one of " + known);
}

const char* expected_kind(spec::AttributeKind kind) {
  switch (kind) {
    case spec::AttributeKind::kReal:
      return "a float";
    case spec::AttributeKind::kChoice:
      return "a string";
    case spec::AttributeKind::kInteger:
    case spec::AttributeKind::kBoolean:
      return "an int";
  }
  return "of another kind";
}

// Whether the attribute was found and written.
bool read_one(const Reader& reader, const spec::AttributeRow& row, char* field) {
  if (row.kind == spec::AttributeKind::kReal) {
    const std::optional<float> value = reader.real(row.name);
    const double wide = value.value_or(0.0F);
    if (value) std::memcpy(field, &wide, sizeof(wide));
    return value.has_value();
  }
  std::optional<int64_t> value;
  if (row.kind == spec::AttributeKind::kChoice) {
    const std::optional<std::string> text = reader.text(row.name);
    if (text) value = index_of_choice(row, *text);
  } else {
    value = reader.integer(row.name);
  }
  const int64_t number = value.value_or(0);
  if (value) std::memcpy(field, &number, sizeof(number));
  return value.has_value();
}

void write_default(const spec::AttributeRow& row, char* field) {
  if (row.kind == spec::AttributeKind::kReal) {
    std::memcpy(field, &row.default_value, sizeof(double));
  } else {
    const auto number = static_cast<int64_t>(row.default_value);
    std::memcpy(field, &number, sizeof(number));
  }
}

}  // namespace

void read_attributes(const Api& api, const OrtKernelInfo* info, const spec::AttributeRow* rows, size_t count,
                     void* attributes) {
  const Reader reader(api, info);
  for (size_t i = 0; i < count; ++i) {
    const spec::AttributeRow& row = rows[i];
    char* field = static_cast<char*>(attributes) + row.offset;
    if (read_one(reader, row, field)) continue;
    if (const char* kind = reader.other_kind(row.name)) {
      throw InvalidArgument(std::string("attribute ") + row.name + " is " + kind + "; it must be " +
                            expected_kind(row.kind));
    }
    if (row.required) throw InvalidArgument(std::string("attribute ") + row.name + " is missing and has no default");
    write_default(row, field);
  }
}

}  // namespace qknorm::ort
