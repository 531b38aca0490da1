// Reads a node's attributes into the structs that are generated from the spec.
#pragma once

#include <string>

#include "ort/status.h"
#include "qknorm/generated/spec.h"

namespace qknorm::ort {

// Fills `attributes` by the rows of its table. Throws InvalidArgument for an attribute that is missing without a
// default, of the wrong kind, or not one of its choices.
void read_attributes(const Api& api, const OrtKernelInfo* info, const spec::AttributeRow* rows, size_t count,
                     void* attributes);

}  // namespace qknorm::ort
