# The software bill of materials: the code of others in the compiled parts. PEP 770 has it in the wheel, in
# .dist-info/sboms. The licences themselves are in THIRD_PARTY_NOTICES.md, and a test compares the two.

set(components "")

# contains(NAME VERSION LICENCE PURL): VERSION may be empty; PURL is a package URL.
macro(contains name version licence purl)
  list(APPEND components
    "{\"type\": \"library\", \"bom-ref\": \"${name}\", \"name\": \"${name}\", \"version\": \"${version}\", \"purl\": \"${purl}\", \"licenses\": [{\"expression\": \"${licence}\"}]}")
endmacro()

contains(nanobind "${nanobind_VERSION}" BSD-3-Clause "pkg:pypi/nanobind@${nanobind_VERSION}")

file(STRINGS "${NB_DIR}/ext/robin_map/include/tsl/robin_growth_policy.h" robin_map_version
     REGEX "define TSL_RH_VERSION_(MAJOR|MINOR|PATCH) ")
list(TRANSFORM robin_map_version REPLACE "[^0-9]" "")
list(JOIN robin_map_version "." robin_map_version)
contains(robin-map "${robin_map_version}" MIT "pkg:github/tessil/robin-map@v${robin_map_version}")

if(CAN_LINK_STATICALLY)  # the guardian
  include(CheckCXXSymbolExists)
  check_cxx_symbol_exists(__GLIBC__ features.h HAS_GLIBC)
  if(HAS_GLIBC)
    contains(glibc "" LGPL-2.1-or-later pkg:generic/glibc)
  else()
    contains(musl "" MIT pkg:generic/musl)
  endif()
  contains(libstdc++ "${CMAKE_CXX_COMPILER_VERSION}" "GPL-3.0-or-later WITH GCC-exception-3.1"
           "pkg:generic/gcc@${CMAKE_CXX_COMPILER_VERSION}")
endif()

if(STATIC_LIBCXX)  # scripts/wheel
  contains(libc++ "${CMAKE_CXX_COMPILER_VERSION}" "Apache-2.0 WITH LLVM-exception"
           "pkg:generic/llvm@${CMAKE_CXX_COMPILER_VERSION}")
endif()

list(JOIN components ",\n    " components)
file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/rallypoint.cdx.json" @ONLY CONTENT [[{
  "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
  "bomFormat": "CycloneDX",
  "specVersion": "1.6",
  "version": 1,
  "metadata": {
    "lifecycles": [{"phase": "build"}],
    "component": {
      "type": "library",
      "bom-ref": "rallypoint",
      "name": "rallypoint",
      "version": "@SKBUILD_PROJECT_VERSION_FULL@",
      "purl": "pkg:pypi/rallypoint@@SKBUILD_PROJECT_VERSION_FULL@",
      "licenses": [{"expression": "Apache-2.0"}]
    },
    "tools": {"components": [
      {"type": "application", "name": "@CMAKE_CXX_COMPILER_ID@", "version": "@CMAKE_CXX_COMPILER_VERSION@"},
      {"type": "application", "name": "CMake", "version": "@CMAKE_VERSION@"}
    ]}
  },
  "components": [
    @components@
  ]
}
]])
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/rallypoint.cdx.json" DESTINATION "${SKBUILD_METADATA_DIR}/sboms")
