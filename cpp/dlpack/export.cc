// JAX exports whole arrays. A block is a part of one, so we take JAX's capsule, which holds the
// buffer (and makes XLA refuse to donate it), and hand out a capsule of our own that points inside
// and keeps JAX's alive. `lease` is any Python object that should live as long, too: the block's
// reference, so that the pool does not hand the block to somebody else.
#include "dlpack/export.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "dlpack/dlpack_abi.h"

namespace nb = nanobind;

namespace {

constexpr char kLegacy[] = "dltensor", kUsedLegacy[] = "used_dltensor";
constexpr char kVersioned[] = "dltensor_versioned", kUsedVersioned[] = "used_dltensor_versioned";

// A consumed capsule: its tensor, and the duty to call its deleter once.
class Owner {
 public:
  explicit Owner(PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, kVersioned)) {
      versioned_ =
          static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, kVersioned));
      if (versioned_->version.major != kDLPackMajor) {
        throw nb::buffer_error("the exporter speaks another major version of DLPack");
      }
      PyCapsule_SetName(capsule, kUsedVersioned);
    } else if (PyCapsule_IsValid(capsule, kLegacy)) {
      legacy_ = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, kLegacy));
      PyCapsule_SetName(capsule, kUsedLegacy);
    } else {
      throw nb::type_error("owner must be an unused DLPack capsule");
    }
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() {
    if (versioned_ != nullptr && versioned_->deleter) versioned_->deleter(versioned_);
    if (legacy_ != nullptr && legacy_->deleter) legacy_->deleter(legacy_);
  }
  const DLTensor& tensor() const { return versioned_ ? versioned_->dl_tensor : legacy_->dl_tensor; }

 private:
  DLManagedTensorVersioned* versioned_ = nullptr;
  DLManagedTensor* legacy_ = nullptr;
};

// Consumers drop tensors on any thread, and each needs the GIL to give its lease back. Python ends
// a thread that still waits for the GIL when the interpreter goes, and no destructor may be left
// that way: the process would abort. So at exit Python lets those in that are on their way; who
// comes later leaves its lease, and there is nobody to give it to.
std::atomic<int> on_their_way{0};
std::atomic<bool> leaving{false};

void LetThemIn() {
  constexpr int kMost = 1000;  // a process that was forked may have counted threads of another
  leaving = true;
  const nb::gil_scoped_release others;
  for (int i = 0; i < kMost && on_their_way != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void GiveBack(PyObject* lease) {
  ++on_their_way;
  if (!leaving && Py_IsInitialized()) {
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(lease);
    PyGILState_Release(state);
  }
  --on_their_way;
}

// Everything one of our capsules owns.
struct View {
  std::unique_ptr<Owner> owner;
  PyObject* lease = nullptr;
  std::vector<int64_t> shape, strides;
  DLManagedTensor legacy{};
  DLManagedTensorVersioned versioned{};

  ~View() {
    if (lease != nullptr) GiveBack(lease);
  }
};

// A capsule that nobody consumed still owns its view.
void DropUnused(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kVersioned)) {
    auto* t = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, kVersioned));
    t->deleter(t);
  } else if (PyCapsule_IsValid(capsule, kLegacy)) {
    auto* t = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, kLegacy));
    t->deleter(t);
  }
}

// The elements that `shape` and `strides` reach, or -1 when the numbers make no sense.
int64_t ReachedElements(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  int64_t last = 0, count = 1;
  for (size_t k = 0; k < shape.size(); ++k) {
    int64_t step = 0;
    if (shape[k] < 0 || strides[k] < 0 || __builtin_mul_overflow(count, shape[k], &count) ||
        __builtin_mul_overflow(std::max<int64_t>(shape[k] - 1, 0), strides[k], &step) ||
        __builtin_add_overflow(last, step, &last)) {
      return -1;
    }
  }
  if (last == INT64_MAX) return -1;
  return count == 0 ? 0 : last + 1;
}

nb::object ExportView(nb::handle capsule, nb::handle lease, int64_t offset,
                      std::vector<int64_t> shape, std::vector<int64_t> strides, int device_type,
                      int device_id, bool versioned, bool copied) {
  auto view = std::make_unique<View>();
  view->owner = std::make_unique<Owner>(capsule.ptr());
  const DLTensor& whole = view->owner->tensor();
  if (shape.size() != strides.size()) throw nb::value_error("shape and strides differ in length");
  int64_t elements = 1;
  for (int k = 0; k < whole.ndim; ++k) elements *= whole.shape[k];
  const int64_t reached = ReachedElements(shape, strides);
  if (offset < 0 || offset > elements || reached < 0 || reached > elements - offset) {
    throw nb::value_error("the view does not lie inside its owner");
  }
  view->lease = lease.inc_ref().ptr();
  view->shape = std::move(shape);
  view->strides = std::move(strides);

  DLTensor tensor = whole;
  const int64_t item = (whole.dtype.bits * whole.dtype.lanes + 7) / 8;
  // Folded into the pointer: several consumers ignore byte_offset.
  tensor.data = static_cast<char*>(whole.data) + whole.byte_offset + offset * item;
  tensor.byte_offset = 0;
  tensor.device = {device_type, device_id};
  tensor.ndim = static_cast<int32_t>(view->shape.size());
  tensor.shape = view->shape.data();
  tensor.strides = view->strides.data();

  PyObject* result = nullptr;
  if (versioned) {
    view->versioned.version = {kDLPackMajor, kDLPackMinor};
    view->versioned.manager_ctx = view.get();
    view->versioned.deleter = [](DLManagedTensorVersioned* self) {
      delete static_cast<View*>(self->manager_ctx);
    };
    view->versioned.flags = copied ? uint64_t{kDLFlagIsCopied} : 0;
    view->versioned.dl_tensor = tensor;
    result = PyCapsule_New(&view->versioned, kVersioned, DropUnused);
  } else {
    view->legacy.manager_ctx = view.get();
    view->legacy.deleter = [](DLManagedTensor* self) {
      delete static_cast<View*>(self->manager_ctx);
    };
    view->legacy.dl_tensor = tensor;
    result = PyCapsule_New(&view->legacy, kLegacy, DropUnused);
  }
  if (result == nullptr) throw nb::python_error();
  view.release();  // the capsule owns it now
  return nb::steal(result);
}

}  // namespace

void RegisterDLPack(nb::module_& m) {
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&LetThemIn));
  m.def("export_view", &ExportView, nb::arg("owner"), nb::arg("lease").none(), nb::arg("offset"),
        nb::arg("shape"), nb::arg("strides"), nb::arg("device_type"), nb::arg("device_id"),
        nb::arg("versioned"), nb::arg("copied"),
        "A DLPack capsule over part of the tensor in capsule `owner`, which is consumed.\n\n"
        "offset and strides count elements; `lease` lives as long as the view does; `copied`\n"
        "says that the owner is a copy made for this export.");
}
