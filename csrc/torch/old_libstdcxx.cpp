/* Functions that the headers of a newer libstdc++ call and an older one lacks. Empty except in a build for an older
 * glibc (old_libstdcxx.h). */
#include <new> // defines _GLIBCXX_EXTERN_TEMPLATE, if old_libstdcxx.h has not

#if _GLIBCXX_EXTERN_TEMPLATE == 0

extern "C" {
/* glibc 2.32 and newer. "Several threads" is always right: reference counts are then atomic. */
extern __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
}

namespace std
{
/* GLIBCXX_3.4.29 */
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
} // namespace std
#endif
