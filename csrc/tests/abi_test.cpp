// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// Our declarations against the vendor's, by the compiler. Needs the headers inside the torch_npu wheel, so no target
// builds it: tests/pure/test_fake_device.py does where that wheel is installed.
#include <cstddef>
#include <type_traits>

#include <acl/acl_rt.h>
#include <hccl/hccl.h>

#include "probes/abi.hpp"
#include "probes/ascend_errors.hpp"

namespace abi = resilient::abi;

namespace {

template <typename Left, typename Right>
constexpr bool same_value() {
  if (std::is_void_v<Left> || std::is_void_v<Right>) return std::is_same_v<Left, Right>;
  if (std::is_pointer_v<Left> != std::is_pointer_v<Right>) return false;
  return sizeof(Left) == sizeof(Right);
}

// Same number of parameters, and each of the same size and sort: all that the calling convention asks.
template <typename Left, typename Right>
struct SameCall : std::false_type {};
template <typename Left, typename... Lefts, typename Right, typename... Rights>
  requires(sizeof...(Lefts) == sizeof...(Rights))
struct SameCall<Left(Lefts...), Right(Rights...)>
    : std::bool_constant<same_value<Left, Right>() && (same_value<Lefts, Rights>() && ...)> {};

#define SAME_CALL(function) static_assert(SameCall<decltype(::function), abi::function>::value)
#define SAME_CODE(theirs, ours) static_assert(static_cast<abi::Code>(theirs) == (ours))

SAME_CALL(HcclGetCommAsyncError);
SAME_CALL(HcclGetErrorString);
SAME_CALL(HcclCommSuspend);
SAME_CALL(HcclCommResume);
SAME_CALL(HcclCommDestroy);
SAME_CALL(aclrtPeekAtLastError);
SAME_CALL(aclrtGetMemUceInfo);
SAME_CALL(aclrtMemUceRepair);
SAME_CALL(aclrtGetErrorVerbose);

SAME_CODE(HCCL_SUCCESS, abi::hccl_success);
SAME_CODE(HCCL_E_AGAIN, abi::hccl_again);
SAME_CODE(HCCL_E_SUSPENDING, abi::hccl_suspending);
SAME_CODE(HCCL_E_OPRETRY_FAIL, abi::hccl_retry_failed);
static_assert(resilient::hccl_errors[0].code == HCCL_E_INTERNAL && resilient::hccl_errors[1].code == HCCL_E_UNAVAIL);
static_assert(resilient::hccl_errors[2].code == HCCL_E_TIMEOUT && resilient::hccl_errors[3].code == HCCL_E_TCP_CONNECT);
static_assert(resilient::hccl_errors[4].code == HCCL_E_ROCE_CONNECT);
static_assert(resilient::hccl_errors[5].code == HCCL_E_TCP_TRANSFER);
static_assert(resilient::hccl_errors[6].code == HCCL_E_ROCE_TRANSFER);
static_assert(resilient::hccl_errors[7].code == HCCL_E_RUNTIME && resilient::hccl_errors[8].code == HCCL_E_DRV);
static_assert(resilient::hccl_errors[9].code == HCCL_E_NETWORK && resilient::hccl_errors[10].code == HCCL_E_REMOTE);
SAME_CODE(ACL_ERROR_RT_DEVICE_TASK_ABORT, abi::acl_task_abort);
SAME_CODE(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, abi::acl_not_supported);
SAME_CODE(ACL_ERROR_RT_DEVICE_MEM_ERROR, abi::acl_memory_error);
SAME_CODE(ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR, abi::acl_hbm_multi_bit_ecc);
SAME_CODE(ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR, abi::acl_suspect_memory);
SAME_CODE(ACL_ERROR_RT_LINK_ERROR, abi::acl_link_error);
SAME_CODE(ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, abi::acl_suspect_remote);
SAME_CODE(ACL_ERROR_RT_COMM_OP_RETRY_FAIL, abi::acl_comm_retry_failed);
SAME_CODE(ACL_RT_THREAD_LEVEL, abi::acl_thread_level);
SAME_CODE(ACL_RT_ERROR_MEMORY, abi::acl_error_memory);

static_assert(MAX_MEM_UCE_INFO_ARRAY_SIZE == abi::acl_ranges_max);
static_assert(ACL_RT_MEM_UCE_INFO_MAX_NUM == abi::acl_verbose_ranges_max);
static_assert(sizeof(aclrtMemUceInfo) == sizeof(abi::MemUceInfo));
static_assert(offsetof(aclrtMemUceInfo, addr) == offsetof(abi::MemUceInfo, address));
static_assert(offsetof(aclrtMemUceInfo, len) == offsetof(abi::MemUceInfo, bytes));
static_assert(sizeof(aclrtErrorInfo) == sizeof(abi::ErrorInfo));
static_assert(offsetof(aclrtErrorInfo, tryRepair) == offsetof(abi::ErrorInfo, try_repair));
static_assert(offsetof(aclrtErrorInfo, hasDetail) == offsetof(abi::ErrorInfo, has_detail));
static_assert(offsetof(aclrtErrorInfo, errorType) == offsetof(abi::ErrorInfo, type));
static_assert(offsetof(aclrtErrorInfo, detail.uceInfo.arraySize) == offsetof(abi::ErrorInfo, range_count));
static_assert(offsetof(aclrtErrorInfo, detail.uceInfo.memUceInfoArray) == offsetof(abi::ErrorInfo, ranges));

}  // namespace
