#include "ort/operator_names.h"

#include <algorithm>
#include <stdexcept>

#include "qknorm/generated/spec.h"

namespace qknorm::ort {
namespace {

std::vector<std::string> numbered(const std::string& op) {
  std::vector<std::string> names = {op};
  for (int number = 2; number <= spec::kNamesPerOperator; ++number) names.push_back(op + "_" + std::to_string(number));
  return names;
}

}  // namespace

const std::vector<std::string>& names_of(const char* op) {
  static const std::vector<std::string> attention = numbered(spec::kAttentionOp);
  static const std::vector<std::string> rotary = numbered(spec::kRotaryOp);
  return op == attention.front() ? attention : rotary;
}

int number_of(const std::string& name) {
  for (const char* op : {spec::kAttentionOp, spec::kRotaryOp}) {
    const std::vector<std::string>& names = names_of(op);
    const auto found = std::find(names.begin(), names.end(), name);
    if (found != names.end()) return static_cast<int>(found - names.begin()) + 1;
  }
  throw std::logic_error("no operator is called " + name);
}

}  // namespace qknorm::ort
